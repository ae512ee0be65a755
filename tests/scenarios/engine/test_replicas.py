"""Engines in processes of their own, from outside: tensor ranks sample what one would, replicas share work and end together."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import torch

from async_rl.config import CharacterTokenizer
from async_rl.config.rollout import WorkerConfig
from async_rl.errors import ConfigError, ServiceStopped
from async_rl.megatron import parallel
from async_rl.megatron.model import build_model
from async_rl.megatron.parameters.full_parameters import load_full
from async_rl.models.shape import Experts, ModelShape
from async_rl.protocols import ContextOverflow, GenerationArgs
from async_rl.tokenization.tokenizers import open_tokenizer
from async_rl.types import Completion, VersionSpan
from rollout_workers.inference.engine import MegatronEngine
from rollout_workers.inference.engine_core import EngineCore, OpenWeights
from rollout_workers.inference.replicas import EngineFleet
from tests.support.full_parameters import gather_full
from tests.support.packed_outputs import completion_logprobs
from tests.support.rank_processes import ranks

pytestmark = pytest.mark.asyncio(loop_scope="module")

CPU = torch.device("cpu")
TOKENIZER_CONFIG = CharacterTokenizer(alphabet="0123456789abcdefghijklmnopqrstuvwxy")
TOKENIZER = open_tokenizer(TOKENIZER_CONFIG)
SHAPE = ModelShape(
    hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=64, vocab_size=TOKENIZER.vocab_size, max_positions=512,
    rope_theta=1e4, init_std=0.3, experts=Experts(number=4, per_token=2, ffn=24, layers=(1,), shared_ffn=16),
)  # fmt: skip
"""Layer 0 is dense."""
DEFAULTS = GenerationArgs(max_tokens=16, temperature=1.0, top_p=1.0, top_k=0, stop=())
LONG = GenerationArgs(max_tokens=500, top_k=5)
"""Does not end by itself."""
Weights = Mapping[str, torch.Tensor]


def weights(seed: int) -> Weights:
    parallel.initialize(device=CPU)
    full = gather_full(build_model(SHAPE, device=CPU, dtype=torch.float32, seed=seed), SHAPE)
    assert full is not None
    full["embedding.word_embeddings.weight"][TOKENIZER.end_id] = 0  # which is never among the five likeliest
    return full


def worker(engines: int, tensor: int, kv_cache_gb: float = 0.01) -> WorkerConfig:
    """Tensor ranks also divide the experts."""
    return WorkerConfig(engines=engines, tensor=tensor, expert=tensor, kv_cache_gb=kv_cache_gb, kv_block_tokens=8)


def fleet(settings: WorkerConfig, **environment: str) -> EngineFleet:
    return EngineFleet(
        SHAPE, TOKENIZER, TOKENIZER_CONFIG, settings, DEFAULTS,
        devices=[CPU] * (settings.engines * settings.tensor), seed=7,
        environment=os.environ
        | {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTHONWARNINGS": "error", "OMP_NUM_THREADS": "1"}
        | environment,
    )  # fmt: skip


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(11)
    lengths = torch.randint(1, 30, (count,), generator=generator).tolist()
    return [torch.randint(4, SHAPE.vocab_size, (length,), generator=generator).tolist() for length in lengths]


def recomputed(under: Weights, prompt: list[int], completion: Completion, top_k: int = 0) -> np.ndarray:
    parallel.initialize(device=CPU)
    model = build_model(SHAPE, device=CPU, dtype=torch.float32, seed=0)
    load_full(model, SHAPE, under)
    return completion_logprobs(model, prompt, completion.token_ids, top_k=top_k)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair() -> AsyncIterator[EngineFleet]:
    """One engine on two tensor ranks. Its vocabulary is odd, so that one of them holds a padded row."""
    assert SHAPE.vocab_size % 2
    async with fleet(worker(engines=1, tensor=2)) as running:
        await running.swap(0, weights(1))
        yield running
    assert not ranks()


class SlowStage(EngineCore):
    """Its weights are staged when the test says so."""

    begun: Future[Future[Weights]]

    def begin_stage(self, weights: OpenWeights) -> Future[Weights]:
        staged: Future[Weights] = Future()
        self.begun.set_result(staged)
        return staged


async def test_generations_go_on_while_weights_come_to_the_device() -> None:
    SlowStage.begun = Future()
    alone = WorkerConfig(kv_cache_gb=0.01, kv_block_tokens=8)
    async with MegatronEngine(SHAPE, TOKENIZER, alone, DEFAULTS, device=CPU, seed=7, core=SlowStage) as engine:
        first, second = weights(1), weights(2)
        await engine.swap(0, first)
        staging = asyncio.create_task(engine.stage(lambda: second))
        staged = await asyncio.wrap_future(SlowStage.begun)
        sampled = await engine.generate([5, 6], GenerationArgs(seed=3))
        assert not staging.done()
        assert {span.version for span in sampled.versions} == {0}
        staged.set_result(second)
        await engine.swap(1, await staging)
        sampled = await engine.generate([5, 6], GenerationArgs(seed=3))
        np.testing.assert_allclose(sampled.logprobs, recomputed(second, [5, 6], sampled), atol=1e-5)


async def test_two_tensor_ranks_sample_what_one_does(pair: EngineFleet) -> None:
    asked = prompts(16)
    args = [
        GenerationArgs(temperature=0.0),
        GenerationArgs(seed=3, max_tokens=30),
        GenerationArgs(seed=4, temperature=0.7, top_k=5, top_p=0.9),
        GenerationArgs(seed=5, stop=("a", "7"), stop_token_ids=(20, 21)),
    ] * 4
    found = await asyncio.gather(*(pair.generate(prompt, each) for prompt, each in zip(asked, args, strict=True)))
    async with MegatronEngine(SHAPE, TOKENIZER, worker(1, 1), DEFAULTS, device=CPU, seed=7) as single:
        await single.swap(0, weights(1))
        wanted = await asyncio.gather(*(single.generate(prompt, each) for prompt, each in zip(asked, args, strict=True)))
    for completion, want in zip(found, wanted, strict=True):
        assert completion.token_ids.tolist() == want.token_ids.tolist()
        assert (completion.stop_reason, completion.text, completion.versions) == (want.stop_reason, want.text, want.versions)
        np.testing.assert_allclose(completion.logprobs, want.logprobs, atol=1e-5)
    assert pair.metrics.tokens_generated >= sum(len(completion.token_ids) for completion in found)


async def test_weights_flip_under_a_generation_that_two_ranks_run(pair: EngineFleet) -> None:
    prompt, old, new = prompts(2)[1], weights(1), weights(2)
    first = pair.version + 1
    await pair.swap(first, old)
    async with asyncio.TaskGroup() as tasks:
        long = tasks.create_task(pair.generate(prompt, replace(LONG, max_tokens=400)))
        await pair.generate(prompt, GenerationArgs(max_tokens=4))
        await pair.swap(first + 1, new)
        assert not long.done()
    completion = long.result()
    flip, length = completion.versions[0].stop, len(completion.token_ids)
    assert completion.versions == (
        VersionSpan(version=first, start=0, stop=flip),
        VersionSpan(version=first + 1, start=flip, stop=length),
    )
    under_old = recomputed(old, prompt, completion, top_k=5)
    np.testing.assert_allclose(completion.logprobs[:flip], under_old[:flip], atol=1e-4)
    assert abs(completion.logprobs[flip] - under_old[flip]) > 1e-3
    late = await pair.generate(prompt, GenerationArgs(max_tokens=4))
    np.testing.assert_allclose(late.logprobs, recomputed(new, prompt, late), atol=1e-4)


async def test_a_cancelled_generation_gives_its_place_back(pair: EngineFleet) -> None:
    long = asyncio.ensure_future(pair.generate("abc", LONG))
    await pair.generate("abc", GenerationArgs(max_tokens=1))
    assert list(pair.loads) == [1]
    long.cancel()
    await asyncio.wait([long])
    assert list(pair.loads) == [0]
    await pair.generate("abc", GenerationArgs(max_tokens=2))
    assert pair.metrics.active_requests == 0


async def test_what_an_engine_refuses_is_refused_from_afar(pair: EngineFleet) -> None:
    with pytest.raises(ContextOverflow, match="a sequence has at most 512"):
        await pair.generate([5] * 512)
    with pytest.raises(ValueError, match="max_tokens=0"):
        await pair.generate([5], GenerationArgs(max_tokens=0))
    with pytest.raises(ValueError, match="versions only grow"):
        await pair.swap(pair.version, weights(1))
    with pytest.raises(ValueError, match="do not fit the model"):
        await pair.swap(pair.version + 1, {})
    assert len((await pair.generate([5], GenerationArgs(max_tokens=1))).token_ids) == 1


async def test_a_tensor_rank_that_is_killed_ends_all_that_waits_for_it() -> None:
    before = ranks().keys()

    async def body() -> None:
        async with fleet(worker(engines=1, tensor=2)) as own:
            watched = asyncio.ensure_future(own.watch())
            await own.swap(0, weights(1))
            (victim,) = (pid for pid, line in ranks().items() if pid not in before and '"rank":1' in line)
            waiting = [asyncio.ensure_future(own.generate([5], LONG)) for _ in range(4)]
            await asyncio.sleep(0)
            assert list(own.loads) == [4]
            os.kill(victim, signal.SIGKILL)
            for one in [*waiting, watched]:
                with pytest.raises(ServiceStopped, match="engine 0, rank 1 was ended by SIGKILL"):
                    await one
            with pytest.raises(ServiceStopped, match="rank 1"):
                await own.generate([5])
            with pytest.raises(ServiceStopped, match="rank 1"):
                await own.swap(1, weights(1))

    with pytest.raises(ServiceStopped, match="rank 1"):
        await body()
    assert ranks().keys() <= before


async def test_replicas_share_the_work_swap_together_and_end_together() -> None:
    asked, sibling = prompts(12), [5] * 20
    parallel.initialize(device=CPU)  # this process keeps the descriptors of its groups
    before, files = ranks().keys(), open_files()

    async def body() -> None:
        async with fleet(worker(engines=2, tensor=1)) as running:
            async with asyncio.TaskGroup() as tasks:
                # Without weights everybody waits, so that it can be seen who waits where.
                spread = [tasks.create_task(running.generate(prompt[:7])) for prompt in asked]
                await asyncio.sleep(0)
                assert list(running.loads) == [6, 6]
                siblings = [tasks.create_task(running.generate(sibling)) for _ in range(4)]
                await asyncio.sleep(0)
                assert sorted(running.loads) == [6, 10]
                await running.swap(0, weights(1))
            for prompt, task in zip([*(prompt[:7] for prompt in asked), *[sibling] * 4], [*spread, *siblings], strict=True):
                assert {span.version for span in task.result().versions} == {0}
                np.testing.assert_allclose(task.result().logprobs, recomputed(weights(1), prompt, task.result()), atol=1e-4)
            await running.swap(1, weights(2))
            for completion in await asyncio.gather(*(running.generate(prompt) for prompt in asked)):
                assert {span.version for span in completion.versions} == {1}

            own = {pid: line for pid, line in ranks().items() if pid not in before}
            victim, other = (next(pid for pid, line in own.items() if name in line) for name in ("engine-1", "engine-0"))
            waiting = [asyncio.ensure_future(running.generate([5], LONG)) for _ in range(4)]
            await asyncio.sleep(0)
            assert list(running.loads) == [2, 2]
            os.kill(other, signal.SIGSTOP)  # or it might be done with them before the end of the victim is seen
            os.kill(victim, signal.SIGKILL)
            for one in waiting:  # also those of the other engine: the worker starts again as a whole
                with pytest.raises(ServiceStopped, match="engine 1, rank 0 was ended by SIGKILL"):
                    await one

    with pytest.raises(ServiceStopped, match="engine 1"):
        await body()
    assert ranks().keys() <= before
    assert open_files() <= files


async def test_a_rank_that_cannot_start_ends_the_engine() -> None:
    before, files = ranks().keys(), open_files()
    with pytest.raises(ServiceStopped, match=r"engine 0, rank \d exited with code 1"):
        async with fleet(worker(engines=1, tensor=2), PYTHONHOME="/nowhere"):
            pass
    assert ranks().keys() <= before
    assert open_files() <= files


async def test_a_mistake_that_only_the_ranks_can_see_is_told_as_one() -> None:
    with pytest.raises(ConfigError, match=r"worker\.kv_cache_gb"):
        async with fleet(worker(engines=1, tensor=1, kv_cache_gb=1e-5)):
            pass
