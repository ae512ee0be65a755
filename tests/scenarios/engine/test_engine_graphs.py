"""Engines that decode on the tensors of CUDA graphs (worker.cuda_graphs: always), which run uncaptured here; also with the next
step launched before the tokens of the last are read.
"""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch

from async_rl.config.rollout import WorkerConfig
from async_rl.errors import ConfigError
from async_rl.megatron import parallel
from async_rl.megatron.engine.async_scheduling import async_schedule_mode
from async_rl.megatron.model import build_model
from async_rl.models.shape import Experts
from async_rl.protocols import GenerationArgs
from async_rl.types import VersionSpan
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
    assert steps - len(asked) <= replayed < steps  # all but those that also compute prompts
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


EXPERTS = Experts(number=6, per_token=2, ffn=40, layers=(1,), shared_ffn=16)


@pytest.mark.parametrize("experts", [None, EXPERTS], ids=["dense", "experts"])
@WORKERS
async def test_steps_on_the_tensors_of_graphs_sample_what_megatrons_context_does(
    experts: Experts | None, worker: WorkerConfig
) -> None:
    shape = replace(SHAPE, experts=experts)
    parallel.initialize(device=CPU)
    full, asked, found = gather_full(build_model(shape, device=CPU, dtype=torch.float32, seed=1), shape), prompts(6), []
    assert full is not None
    for each in (worker, WORKER.model_copy(update={"cuda_graphs": "never"})):
        async with engine(worker=each, shape=shape, tokenizer=ENDLESS) as running:
            await running.swap(0, full)
            found.append(
                await asyncio.gather(*(running.generate(prompt, GenerationArgs(max_tokens=20, seed=1)) for prompt in asked))
            )
            assert each is not worker or graph_steps(running) >= 14
    for one, other in zip(*found, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)  # with other numbers of padded rows


@pytest.mark.skipif(async_schedule_mode() is not None, reason="this version of megatron-core has async scheduling")
async def test_async_scheduling_is_refused_where_megatron_has_none() -> None:
    with pytest.raises(ConfigError, match=r"worker\.async_scheduling needs megatron-core 0\.19, and 0\.1"):
        async with engine(worker=WORKER.model_copy(update={"async_scheduling": True})):
            raise AssertionError


async def test_what_graphs_cannot_do_is_refused_in_a_sentence() -> None:
    with pytest.raises(ConfigError, match=r"worker\.cuda_graphs: always cannot be, because model\.layer_spec is transformer_e"):
        async with engine(worker=WORKER, layer_spec="transformer_engine"):
            raise AssertionError
