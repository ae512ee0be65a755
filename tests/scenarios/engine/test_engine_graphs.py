"""Engines that decode and compute short prompts on the tensors of CUDA graphs (worker.cuda_graphs: always), which run
uncaptured here; also with the next step launched before the tokens of the last are read.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from async_rl.config.rollout import WorkerConfig
from async_rl.errors import ConfigError
from async_rl.megatron import parallel
from async_rl.megatron.engine.async_scheduling import async_schedule_mode
from async_rl.megatron.model import build_model
from async_rl.models.shape import Experts, ModelShape, Window
from async_rl.protocols import GenerationArgs
from async_rl.types import Completion, VersionSpan
from rollout_workers.inference.engine import MegatronEngine
from rollout_workers.inference.engine_core import EngineCore
from tests.support.engine_stage import CPU, ENDLESS, SCHEDULES_ASYNC, SHAPE, Gate, engine, prompts, recomputed, weights
from tests.support.full_parameters import gather_full

WORKER = WorkerConfig(kv_cache_gb=0.01, kv_block_tokens=8, max_running=6, cuda_graphs="always")
WORKERS = pytest.mark.parametrize(
    "worker",
    [WORKER, pytest.param(WORKER.model_copy(update={"async_scheduling": True}), marks=SCHEDULES_ASYNC)],
    ids=["", "async"],
)


def graph_steps(running: MegatronEngine) -> int:
    core = running._core
    assert isinstance(core, EngineCore)
    assert core.graphs is not None
    return core.graphs.replays


@WORKERS
async def test_generations_that_come_and_go_are_those_of_a_full_forward_pass(worker: WorkerConfig) -> None:
    asked = prompts(14)
    async with engine(worker=worker, tokenizer=ENDLESS) as running:
        await running.swap(0, weights(1))
        found = await asyncio.gather(
            *(running.generate(prompt, GenerationArgs(max_tokens=3 + 2 * place)) for place, prompt in enumerate(asked))
        )
        steps, replayed = running.metrics.steps, graph_steps(running)
    assert replayed == steps, "also those that compute prompts"
    for prompt, completion in zip(asked, found, strict=True):
        np.testing.assert_allclose(completion.logprobs, recomputed(weights(1), prompt, completion), atol=1e-4)


@WORKERS
@pytest.mark.parametrize("kv", ["keep", "recompute"])
async def test_weights_are_swapped_under_the_graphs(kv: str, worker: WorkerConfig) -> None:
    asked, gate = prompts(3, longest=12), Gate(after=6)
    async with engine(worker=worker.model_copy(update={"kv_on_swap": kv}), tokenizer=gate) as running:
        await running.swap(0, weights(1))
        async with asyncio.TaskGroup() as tasks:
            generations = [tasks.create_task(running.generate(prompt, GenerationArgs(max_tokens=40))) for prompt in asked]
            await gate.reached.wait()
            swapping = tasks.create_task(running.swap(1, weights(2)))
            await asyncio.sleep(0)
            gate.open()
            await swapping
        replayed = graph_steps(running)
    assert replayed > 30
    by_new = list[float]()
    for prompt, task in zip(asked, generations, strict=True):
        completion = task.result()
        flip = completion.versions[0].stop
        assert completion.versions == (VersionSpan(version=0, start=0, stop=flip), VersionSpan(version=1, start=flip, stop=40))
        before = recomputed(weights(1), prompt, completion)
        np.testing.assert_allclose(completion.logprobs[:flip], before[:flip], atol=1e-4)
        if kv == "recompute":
            np.testing.assert_allclose(completion.logprobs[flip:], recomputed(weights(2), prompt, completion)[flip:], atol=1e-4)
        else:
            assert np.abs(completion.logprobs[flip:] - before[flip:]).max() > 0.1
        by_new.append(abs(completion.logprobs[flip] - before[flip]))
    assert max(by_new) > 1e-3, "the first token of a version has the logits of that version's weights"


def test_graphs_are_captured_again_only_if_weights_lie_elsewhere() -> None:
    core = EngineCore(
        shape=SHAPE, tokenizer=ENDLESS, worker=WORKER, device=CPU, dtype=torch.float32, seed=7, layer_spec="local"
    )  # fmt: skip
    try:
        assert core.graphs is not None
        captured = core.graphs._replay
        for version in range(2):
            core.swap(version, weights(version))
            assert core.graphs._replay is captured
        norm = core._model.decoder.final_layernorm
        norm.weight = torch.nn.Parameter(norm.weight.detach().clone())  # which is not what weights are loaded into
        core.swap(2, weights(2))
        assert core.graphs._replay is not captured
        captured = core.graphs._replay
        norm.weight.data = norm.weight.data.clone()
        core.swap(3, weights(3))
        assert core.graphs._replay is not captured
    finally:
        core.close()


SHAPES = pytest.mark.parametrize(
    "shape",
    [
        SHAPE,
        replace(SHAPE, experts=Experts(number=6, per_token=2, ffn=40, layers=(1,), shared_ffn=16)),
        replace(SHAPE, window=Window(tokens=5, layers=(0,))),
    ],
    ids=["dense", "experts", "window"],
)


async def generated(running: MegatronEngine, asked: Sequence[list[int]]) -> list[Completion]:
    return await asyncio.gather(
        *(
            running.generate(prompt, GenerationArgs(max_tokens=5 + 3 * (place % 5), seed=1))
            for place, prompt in enumerate(asked)
        )
    )


def assert_alike(some: Sequence[Completion], others: Sequence[Completion]) -> None:
    for one, other in zip(some, others, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)  # with other numbers of padded rows


@SHAPES
@pytest.mark.parametrize("prompt_tokens", [5, 4096], ids=["chunks", "whole prompts"])
@WORKERS
async def test_steps_on_the_tensors_of_graphs_sample_what_megatrons_context_does(
    shape: ModelShape, prompt_tokens: int, worker: WorkerConfig
) -> None:
    """Several prompts at first, then others beside generations that decode; the last are continuations of the longest prompt,
    whose blocks are shared.
    """
    longest = max(asked := prompts(9), key=len)
    asked += [[*longest[:stop], 7, 8] for stop in (8, 15, 16, 20)]
    parallel.initialize(device=CPU)
    full, found = gather_full(build_model(shape, device=CPU, dtype=torch.float32, seed=1), shape), []
    assert full is not None
    for changed in ({}, {"cuda_graphs": "never", "async_scheduling": False}):
        update = {"prompt_tokens_per_step": prompt_tokens, **changed}
        async with engine(worker=worker.model_copy(update=update), shape=shape, tokenizer=ENDLESS) as running:
            await running.swap(0, full)
            found.append(await generated(running, asked))
            assert running.metrics.prefix_tokens_reused >= 8 + 8 + 16 + 16
            assert changed or graph_steps(running) == running.metrics.steps
    assert_alike(*found)


@pytest.mark.parametrize(
    ("number", "length", "prompt_tokens", "eager"), [(4, 150, 600, 1), (1, 1500, 500, 3)], ids=["tokens", "keys"]
)
async def test_steps_with_too_many_tokens_or_keys_of_prompts_run_as_without_graphs(
    number: int, length: int, prompt_tokens: int, eager: int
) -> None:
    asked = [[(start + index * index) % 29 + 4 for index in range(length)] for start in range(number)]
    found = []
    for graphs in ("always", "never"):
        worker = WORKER.model_copy(update={"cuda_graphs": graphs, "prompt_tokens_per_step": prompt_tokens})
        async with engine(worker=worker, shape=replace(SHAPE, max_positions=2048), tokenizer=ENDLESS) as running:
            await running.swap(0, weights(1))
            found.append(await generated(running, asked))
            assert graphs == "never" or running.metrics.steps - graph_steps(running) == eager
    assert_alike(*found)


@pytest.mark.skipif(async_schedule_mode() is not None, reason="this version of megatron-core has async scheduling")
async def test_async_scheduling_is_refused_where_megatron_has_none() -> None:
    with pytest.raises(ConfigError, match=r"worker\.async_scheduling needs megatron-core 0\.19, and 0\.1"):
        async with engine(worker=WORKER.model_copy(update={"async_scheduling": True})):
            raise AssertionError


async def test_what_graphs_cannot_do_is_refused_in_a_sentence() -> None:
    with pytest.raises(ConfigError, match=r"worker\.cuda_graphs: always cannot be, because model\.layer_spec is transformer_e"):
        async with engine(worker=WORKER, layer_spec="transformer_engine"):
            raise AssertionError
