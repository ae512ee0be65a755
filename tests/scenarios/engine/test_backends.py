"""Backends beside the Megatron engine, on one small model: they say the same, and what they return decides their use."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from async_rl.config import ModelConfig
from async_rl.config.evaluation import HuggingFacePolicy, OpenAIPolicy, PolicySampling
from async_rl.config.rollout import GatewayConfig, WorkerConfig
from async_rl.config.tokenizer import HuggingFaceTokenizer
from async_rl.errors import ConfigError
from async_rl.megatron.huggingface.tensors import load_folder
from async_rl.models.from_config import model_shape
from async_rl.protocols import ContextOverflow, EpisodeContext, GenerationArgs
from async_rl.tokenization.tokenizers import open_tokenizer
from async_rl.types import Status, StopReason, Ticket
from rollout_workers.environments.counting import Counting
from rollout_workers.gateway import HttpGateway, open_gateway
from rollout_workers.inference.engine import MegatronEngine
from rollout_workers.inference.huggingface.folder_model import HuggingFaceInference, open_hf
from rollout_workers.inference.openai.backend import open_openai
from rollout_workers.policies import open_policies
from tests.support.small_models import write_folder

CPU = torch.device("cpu")
DEFAULTS = GenerationArgs(max_tokens=12, temperature=1.0)
PROMPTS = ["3=", "90=", "1=2=", "=" * 40]


@dataclass(frozen=True, kw_only=True)
class Stage:
    folder: Path
    engine: MegatronEngine
    oracle: HuggingFaceInference
    gateway: HttpGateway


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    folder = write_folder(tmp_path / "model")
    tokenizer = open_tokenizer(HuggingFaceTokenizer(type="huggingface", folder=folder))
    shape = model_shape(ModelConfig(folder=folder), tokenizer.vocab_size)
    async with AsyncExitStack() as opened:
        engine = await opened.enter_async_context(
            MegatronEngine(shape, tokenizer, WorkerConfig(kv_cache_gb=0.01, kv_block_tokens=8), DEFAULTS, device=CPU, seed=1)
        )
        await engine.swap(3, load_folder(folder, shape, torch.float32))
        yield Stage(
            folder=folder,
            engine=engine,
            oracle=await opened.enter_async_context(open_hf(folder, tokenizer, DEFAULTS, device=CPU)),
            gateway=await opened.enter_async_context(
                open_gateway(GatewayConfig(), context_tokens=shape.max_positions, run_token="test")
            ),
        )


async def test_the_engine_and_transformers_say_the_same(stage: Stage) -> None:
    assert stage.oracle.returns == "tokens"
    for prompt in PROMPTS:
        ours = await stage.engine.generate(prompt, GenerationArgs(temperature=0))
        theirs = await stage.oracle.generate(prompt, temperature=0)
        assert ours.token_ids.tolist() == theirs.token_ids.tolist()
        assert (ours.text, ours.stop_reason) == (theirs.text, theirs.stop_reason)


async def test_transformers_honours_what_it_is_asked_for(stage: Stage) -> None:
    oracle = stage.oracle
    free = await oracle.generate("3=", max_tokens=30, seed=4)
    again = await oracle.generate("3=", max_tokens=30, seed=4)
    assert free.token_ids.tolist() == again.token_ids.tolist()
    assert len(free.logprobs) == len(free.token_ids)
    assert (free.logprobs <= 0).all()
    narrow = await oracle.generate("3=", max_tokens=4, top_k=1)
    assert narrow.token_ids.tolist() == (await oracle.generate("3=", max_tokens=4, temperature=0)).token_ids.tolist()
    assert np.allclose(narrow.logprobs, 0), "the probabilities are those of the distribution that was drawn from"
    first = narrow.text[0]
    stopped = await oracle.generate("3=", max_tokens=4, temperature=0, stop=(first,))
    assert (stopped.text, stopped.stop_reason) == (first, StopReason.STOP)
    by_id = await oracle.generate("3=", max_tokens=4, temperature=0, stop_token_ids=(int(narrow.token_ids[0]),))
    assert (by_id.text, by_id.stop_reason) == (first, StopReason.STOP)
    with pytest.raises(ContextOverflow, match="64 tokens"):
        await oracle.generate("1" * 64)


async def test_what_is_sampled_through_the_gateway_can_be_trained_on(stage: Stage) -> None:
    agent = Counting(name="counting", length=4)
    task = agent.task(0)
    context = EpisodeContext(ticket=Ticket(id="t", task_index=0, version=3, attempt=1), sibling=0, seed=0)
    async with stage.gateway.session(stage.engine) as session:
        config = OpenAIPolicy(
            url=session.base_url, model="policy", tokenizer=HuggingFaceTokenizer(type="huggingface", folder=stage.folder)
        )
        async with open_openai(config) as remote:
            assert remote.returns == "logprobs"
            rollout = await agent.rollout(task, remote, context)
            greedy = await remote.generate("90=", temperature=0, top_k=0)
    assert rollout.status in (Status.OK, Status.TRUNCATED)
    last = session.turns[-2]
    (row,) = rollout.samples
    assert row.token_ids[row.loss_mask == 1].tolist() == last.token_ids.tolist()
    assert np.array_equal(row.logprobs[row.loss_mask == 1], last.logprobs)
    assert {span.version for span in row.versions} == {3}
    assert greedy.token_ids.tolist() == (await stage.engine.generate("90=", GenerationArgs(temperature=0))).token_ids.tolist()


async def test_policies_are_opened_by_name_and_what_they_lack_is_filled_in(stage: Stage) -> None:
    async with stage.gateway.session(stage.engine) as session:
        policies = {
            "judge": OpenAIPolicy(url=session.base_url, model="judge", sampling=PolicySampling(max_tokens=3)),
            "earlier": HuggingFacePolicy(type="hf", folder=stage.folder, sampling=PolicySampling(temperature=0, max_tokens=5)),
        }
        async with open_policies(policies, device=CPU) as opened:
            said = await opened["earlier"].generate("3=")
            expected = await stage.oracle.generate("3=", temperature=0, max_tokens=5)
            assert said.token_ids.tolist() == expected.token_ids.tolist()
            assert [(span.version, span.stop) for span in said.versions] == [(-1, len(said.token_ids))]


async def test_a_policy_that_cannot_be_opened_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^policies\.judge: .*nowhere"):
        async with open_policies({"judge": HuggingFacePolicy(type="hf", folder=Path("nowhere"))}, device=CPU):
            pass


async def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    tokenizer = open_tokenizer(HuggingFaceTokenizer(type="huggingface", folder=write_folder(tmp_path / "model")))
    with pytest.raises(ConfigError, match=r"no Hugging Face folder: it has no config.json"):
        async with open_hf(tmp_path, tokenizer, DEFAULTS, device=CPU):
            pass
