"""The engine over transformers samples every model family as the learner computes it. test_engine.py drives it too."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from async_rl.config.rollout import WorkerConfig
from async_rl.megatron import parallel
from async_rl.megatron.huggingface.tensors import load_folder
from async_rl.megatron.model import build_model
from async_rl.megatron.parameters.full_parameters import load_full
from async_rl.models.hf_config import read_shape
from async_rl.models.shape import ModelShape
from async_rl.protocols import GenerationArgs
from async_rl.types import Completion, spans_of
from tests.support.engine_stage import CPU, DEFAULTS, ENDLESS, SHAPE, Gate, engine_of, prompts, recomputed, weights
from tests.support.model_families import MODELS, write_model
from tests.support.packed_outputs import completion_logprobs

Weights = Mapping[str, torch.Tensor]

OLD, NEW = 3, 5


def learner_logprobs(model: torch.nn.Module, prompt: list[int], completion: Completion, args: GenerationArgs) -> np.ndarray:
    chosen = args.over(DEFAULTS)
    assert chosen.temperature is not None
    assert chosen.top_k is not None
    assert chosen.top_p is not None
    how = {"temperature": chosen.temperature, "top_k": chosen.top_k, "top_p": chosen.top_p}
    return completion_logprobs(model, prompt, completion.token_ids, **how)


async def greedy(backend: str, shape: ModelShape, full: Weights, asked: list[list[int]]) -> list[list[int]]:
    args = GenerationArgs(temperature=0, max_tokens=12)
    async with engine_of(backend, shape=shape, tokenizer=ENDLESS) as running:
        await running.swap(0, full)
        found = await asyncio.gather(*(running.generate(prompt, args) for prompt in asked))
    return [completion.token_ids.tolist() for completion in found]


@pytest.mark.parametrize("name", MODELS)
async def test_every_family_is_sampled_as_the_learner_and_the_megatron_engine_compute_it(tmp_path: Path, name: str) -> None:
    write_model(name, tmp_path)
    shape, several = (
        read_shape(tmp_path),
        (GenerationArgs(), GenerationArgs(temperature=0.7), GenerationArgs(top_k=9, top_p=0.9)),
    )
    full, distinct = load_folder(tmp_path, shape, torch.float32), prompts(6)
    assert await greedy("hf", shape, full, distinct) == await greedy("megatron", shape, full, distinct)

    asked = [prompt for prompt in distinct for _ in several]  # siblings share their prompts
    arguments = [replace(args, max_tokens=4 + position) for position in range(6) for args in several]
    worker = WorkerConfig(kv_cache_gb=0.01, prompt_tokens_per_step=7)  # the longer prompts need several passes
    async with engine_of("hf", shape=shape, worker=worker) as running:
        await running.swap(0, full)
        found = await asyncio.gather(*(running.generate(prompt, args) for prompt, args in zip(asked, arguments, strict=True)))
    parallel.initialize(device=CPU)
    model = build_model(shape, device=CPU, dtype=torch.float32, seed=0)
    load_full(model, shape, full)
    for prompt, args, completion in zip(asked, arguments, found, strict=True):
        np.testing.assert_allclose(completion.logprobs, learner_logprobs(model, prompt, completion, args), atol=1e-5)
        assert completion.versions == spans_of([0] * len(completion.token_ids))


async def test_siblings_compute_their_prompt_once() -> None:
    prompt = prompts(1)[0]
    for reuse, saved in ((True, 3 * len(prompt)), (False, 0)):
        async with engine_of("hf", worker=WorkerConfig(kv_cache_gb=0.01, prefix_reuse=reuse)) as running:
            waiting = [asyncio.ensure_future(running.generate(prompt, GenerationArgs(max_tokens=2))) for _ in range(4)]
            await asyncio.sleep(0)
            await running.swap(0, weights(1))
            await asyncio.gather(*waiting)
            assert running.metrics.prefix_tokens_reused == saved


@pytest.mark.parametrize("kv", ["keep", "recompute"])
async def test_after_a_swap_keys_are_kept_or_computed_again(kv: str) -> None:
    asked, gate = prompts(8), Gate(after=10)
    worker = WorkerConfig.model_validate({"kv_cache_gb": 0.01, "kv_on_swap": kv})
    async with engine_of("hf", tokenizer=gate, worker=worker) as running:
        await running.swap(OLD, weights(1))
        async with asyncio.TaskGroup() as tasks:
            generations = [tasks.create_task(running.generate(prompt, GenerationArgs(max_tokens=20))) for prompt in asked]
            await gate.reached.wait()
            swapping = tasks.create_task(running.swap(NEW, weights(2)))
            await asyncio.sleep(0)
            gate.open()
            await swapping
        await running.swap(NEW + 1, weights(2))  # completions leave in the middle of a step, a swap comes between two
        assert (running.metrics.kv_blocks_used, running.metrics.active_requests) == (0, 0)
    differs = False
    for prompt, task in zip(asked, generations, strict=True):
        completion = task.result()
        flip = completion.versions[0].stop
        assert completion.versions == spans_of([OLD] * flip + [NEW] * (20 - flip))
        under_old, under_new = (recomputed(weights(seed), prompt, completion) for seed in (1, 2))
        np.testing.assert_allclose(completion.logprobs[:flip], under_old[:flip], atol=1e-5)
        if kv == "recompute":
            np.testing.assert_allclose(completion.logprobs[flip:], under_new[flip:], atol=1e-5)
        differs |= bool(np.abs(completion.logprobs[flip:] - under_new[flip:]).max() > 1e-3)
    assert differs == (kv == "keep"), "with `keep` the first keys are those of the old weights"


async def test_a_cache_that_is_full_delays_generations() -> None:
    tokens = 3 * SHAPE.max_positions
    worker = WorkerConfig(kv_cache_gb=tokens * 2 * SHAPE.layers * SHAPE.kv_heads * SHAPE.head_dim * 4 / 2**30)
    gate, seen = Gate(after=12), []
    async with engine_of("hf", worker=worker, tokenizer=gate) as running:
        await running.swap(0, weights(1))
        waiting = [asyncio.ensure_future(running.generate([5, 6], GenerationArgs(max_tokens=62))) for _ in range(7)]
        await gate.reached.wait()
        seen.append(running.metrics)
        gate.open()
        found = await asyncio.gather(*waiting)
    assert (seen[0].waiting_requests, seen[0].active_requests, seen[0].kv_blocks) == (4, 7, tokens)
    assert seen[0].kv_blocks_used <= tokens
    for completion in found:
        np.testing.assert_allclose(completion.logprobs, recomputed(weights(1), [5, 6], completion), atol=1e-5)
