"""The engine samples from models with experts as the learner computes them, also after new weights arrived."""

import asyncio
from dataclasses import replace

import numpy as np
import torch

from async_rl.megatron import parallel
from async_rl.megatron.model import build_model
from async_rl.models.shape import Experts
from async_rl.protocols import GenerationArgs
from async_rl.types import Completion
from tests.support import engine_stage
from tests.support.engine_stage import CPU, engine, prompts
from tests.support.full_parameters import gather_full
from tests.support.packed_outputs import completion_logprobs

SHAPE = replace(engine_stage.SHAPE, qk_norm=True, experts=Experts(number=6, per_token=2, ffn=40, layers=(1,)))


def learner(seed: int) -> torch.nn.Module:
    parallel.initialize(device=CPU)
    return build_model(SHAPE, device=CPU, dtype=torch.float32, seed=seed)


def recomputed(model: torch.nn.Module, prompt: list[int], completion: Completion) -> np.ndarray:
    return completion_logprobs(model, prompt, completion.token_ids)


async def test_logprobs_are_those_of_the_learner() -> None:
    models, asked, found = [learner(seed) for seed in (1, 2)], prompts(12), []
    weights = [full for model in models if (full := gather_full(model, SHAPE)) is not None]
    async with engine(shape=SHAPE) as running:
        for version, full in enumerate(weights):
            await running.swap(version, full)
            found.append(await asyncio.gather(*(running.generate(each, GenerationArgs(max_tokens=20)) for each in asked)))
    for model, completions in zip(models, found, strict=True):
        for prompt, completion in zip(asked, completions, strict=True):
            np.testing.assert_allclose(completion.logprobs, recomputed(model, prompt, completion), atol=1e-4)
    assert any(one.token_ids.tolist() != other.token_ids.tolist() for one, other in zip(*found, strict=True))
