"""Every model family is generated from and trained: engine and learner agree before and after two steps."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from async_rl.config import Config
from async_rl.megatron import parallel
from async_rl.megatron.huggingface.tensors import load_folder
from async_rl.megatron.model import build_model, forward_packed, pack
from async_rl.megatron.parameters.full_parameters import load_full
from async_rl.models.hf_config import read_shape
from async_rl.models.shape import ModelShape
from async_rl.protocols import GenerationArgs
from async_rl.types import Completion, Rollout, RolloutGroup, Sample, Status, TakenGroup, Task, VersionSpan
from learner.batches.batch import pack_batch
from learner.objective import load_objective
from learner.ranks.rank_group import RankGroup
from tests.support.engine_stage import CPU, ENDLESS, engine, prompts
from tests.support.full_weights import weights_of
from tests.support.model_families import MODELS, write_model
from tests.support.packed_outputs import completion_logprobs

ONE_OF_EACH_FAMILY = {settings["model_type"]: name for name, settings in reversed(MODELS.items())}
GREEDY, SAMPLED = (GenerationArgs(max_tokens=20, temperature=temperature) for temperature in (0.0, 1.0))
PROMPTS = prompts(6)


def run_of(folder: Path) -> Config:
    return Config.model_validate(
        {
            "model": {"folder": str(folder)},
            "environments": [{"type": "even_digits"}],
            "batch": {"drop_no_signal": False},
            "learner": {"steps": 2, "optimizer": {"learning_rate": 0.01, "warmup_steps": 0}},
        }
    )


async def generated(shape: ModelShape, weights: Mapping[str, Tensor]) -> list[list[Completion]]:
    """A greedy and two sampled completions of each prompt, all in flight together."""
    async with engine(shape=shape, tokenizer=ENDLESS) as running:
        await running.swap(0, weights)
        asked = [running.generate(prompt, how) for prompt in PROMPTS for how in (GREEDY, SAMPLED, SAMPLED)]
        found = await asyncio.gather(*asked)
    return [found[first : first + 3] for first in range(0, len(found), 3)]


def check(shape: ModelShape, weights: Mapping[str, Tensor], found: Sequence[Sequence[Completion]]) -> None:
    """A full forward pass of the learner's model gives the same log-probabilities, and its likeliest tokens are the greedy."""
    parallel.initialize(device=CPU)
    model = build_model(shape, device=CPU, dtype=torch.float32, seed=0)
    load_full(model, shape, weights)
    for prompt, completions in zip(PROMPTS, found, strict=True):
        for place, completion in enumerate(completions):
            if place == 0:
                with torch.no_grad():
                    logits = forward_packed(model, *pack([torch.tensor([*prompt, *completion.token_ids.tolist()])])).logits()
                assert completion.token_ids.tolist() == logits[len(prompt) - 1 : -1].argmax(dim=-1).tolist()
            else:
                recomputed = completion_logprobs(model, prompt, completion.token_ids)
                np.testing.assert_allclose(completion.logprobs, recomputed, atol=1e-4)


def taken(prompt: Sequence[int], sampled: Sequence[Completion], reward: float) -> TakenGroup:
    rollouts = tuple(_rollout(prompt, each, reward * place) for place, each in enumerate(sampled))
    group = RolloutGroup(id="g", task=Task(key="t", environment="e", prompt="p"), rollouts=rollouts, worker="w")
    return TakenGroup(group=group, version_at_commit=0, version_at_take=0)


def _rollout(prompt: Sequence[int], completion: Completion, reward: float) -> Rollout:
    length = len(prompt) + len(completion.token_ids)
    row = Sample(
        token_ids=np.array([*prompt, *completion.token_ids], np.int32),
        loss_mask=np.repeat([0, 1], [len(prompt), length - len(prompt)]).astype(np.uint8),
        logprobs=np.concatenate([np.zeros(len(prompt), np.float32), completion.logprobs]),
        versions=(VersionSpan(version=0, start=len(prompt), stop=length),),
    )
    return Rollout(samples=(row,), reward=reward, status=Status.OK)


@pytest.mark.parametrize("name", [*ONE_OF_EACH_FAMILY.values(), "qwen3-yarn", "qwen2-linear"])
async def test_engine_and_learner_compute_the_same_model(tmp_path: Path, name: str) -> None:
    write_model(name, tmp_path)
    shape, objective = read_shape(tmp_path), load_objective("reinforce")
    weights = load_folder(tmp_path, shape, torch.float32)
    found = await generated(shape, dict(weights))
    check(shape, weights, found)

    groups = [
        taken(prompt, sampled, reward)
        for reward, (prompt, (_, *sampled)) in enumerate(zip(PROMPTS, found, strict=True), start=1)
    ]
    learner = RankGroup(run_of(tmp_path), objective, shape)
    batch = pack_batch(groups, objective=objective, capacity=64, num_shards=1)
    first, second = (learner.step(batch) for _ in range(2))
    trained = weights_of(learner)
    learner.stop()
    assert first.metrics["policy/ratio_max"] == pytest.approx(1, abs=1e-4)
    assert second.metrics["policy/ratio_max"] > 1.001
    unchanged = [name for name, tensor in trained.items() if torch.equal(tensor, weights[name])]
    assert unchanged == []
    check(shape, trained, await generated(shape, trained))
