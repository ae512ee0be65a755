"""`worker.kv_cache_gb: auto`: what an engine takes of a GPU that it has alone or shares, and what the plan says about that."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from async_rl.config import Config
from async_rl.errors import ConfigError
from async_rl.models.shape import ModelShape
from async_rl.plan.gpus import Gpus, problems, with_cache
from async_rl.plan.memory import RECEIVED, memory_plan, total
from async_rl.plan.worker import CONTEXT_BYTES, EngineMemory, auto_cache_on_cpu, auto_cache_on_gpu, engine_memory

GB = 2**30
NEEDS = EngineMemory(weights=2 * GB, activations=GB, logits=GB, received=2 * GB, sequence=GB)
QWEN3: Any = {"kv_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_positions": 1536, "rope_theta": 1e6, "qk_norm": True}
QWEN3_600M = ModelShape(hidden=1024, layers=28, heads=16, ffn=3072, tied_embeddings=True, **QWEN3)
QWEN3_4B = ModelShape(hidden=2560, layers=36, heads=32, ffn=9728, tied_embeddings=True, **QWEN3)


def config(learner: Any = None, **worker: Any) -> Config:
    """A run on one GPU, with an evaluator beside the worker."""
    sections = {
        "device": "cuda",
        "model": {"size": {"hidden": 64, "layers": 2, "heads": 4}, "max_sequence": 1536},
        "environments": [{"type": "even_digits"}],
        "batch": {"bin_tokens": 8192},
        "evaluation": {"every": 20, "environments": ["even_digits"]},
        "worker": {"kv_cache_gb": "auto", "gpu_share": 0.25, **worker},
        "learner": learner or {},
    }
    return Config.model_validate(sections)


@pytest.mark.parametrize(
    ("share", "free", "cache"),
    [(0.5, None, 33), (0.9, None, 65), (0.9, 30, 26), (0.5, 60, 33)],
    ids=["its share", "nearly all", "others are there already", "others come later"],
)
def test_the_cache_is_what_the_share_and_the_free_memory_leave(share: float, free: int | None, cache: int) -> None:
    found = auto_cache_on_gpu(NEEDS, share=share, total=80 * GB, free=free * GB if free is not None else None)
    assert found == cache * GB


def test_a_share_without_room_for_a_sequence_is_a_mistake() -> None:
    with pytest.raises(
        ConfigError, match=r"worker\.gpu_share: 0\.1 of a GPU of 24\.0 GB leaves no room.*takes 7\.0 GB besides"
    ):
        auto_cache_on_gpu(NEEDS, share=0.1, total=24 * GB)
    with pytest.raises(ConfigError, match=r"of which 4\.0 are free beside its weights"):
        auto_cache_on_gpu(NEEDS, share=0.9, total=80 * GB, free=4 * GB)


def test_parcels_larger_than_a_ranks_part_may_come_by_way_of_the_host() -> None:
    with pytest.raises(ConfigError, match=r"model\.max_sequence, or set wire\.shared_memory: false"):
        auto_cache_on_gpu(replace(NEEDS, received=20 * GB), share=0.9, total=24 * GB)
    with pytest.raises(ConfigError, match=r"model\.max_sequence$"):
        auto_cache_on_gpu(NEEDS, share=0.1, total=24 * GB)


def test_on_a_cpu_it_is_the_running_sequences_up_to_a_limit() -> None:
    run = config().worker
    small = ModelShape(
        hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=64, vocab_size=100, max_positions=64, rope_theta=1e4
    )
    needs = engine_memory(small, run, element=4, running=run.max_running, on_cpu=True)
    assert auto_cache_on_cpu(small, run, needs, 4) == 256 * 64 * 2 * 2 * 2 * 8 * 4
    needs = engine_memory(QWEN3_600M, run, element=4, running=run.max_running, on_cpu=True)
    assert auto_cache_on_cpu(QWEN3_600M, run, needs, 4) == GB
    assert needs.received == 0


@pytest.mark.parametrize(
    ("engines", "tensor", "learner_ranks", "wholes"),
    [(1, 1, 1, 1.0), (1, 2, 1, 1.0), (1, 2, 4, 0.5), (2, 2, 4, 0.25), (4, 2, 4, 0.25), (1, 2, 3, 2 / 3)],
    ids=["one GPU", "one parcel", "two each", "one each", "more GPUs than parcels", "two of three"],
)
def test_engines_of_several_gpus_receive_there(engines: int, tensor: int, learner_ranks: int, wholes: float) -> None:
    run = config({"parallel": {"processes": learner_ranks}}, engines=engines, tensor=tensor)
    by_host = run.model_copy(update={"wire": run.wire.model_copy(update={"shared_memory": False})})
    whole, there, on_host = (memory_plan(each, QWEN3_4B).engine for each in (config(), run, by_host))
    assert whole is not None
    assert there is not None
    assembled = (
        tensor * GB // 4 + 2 * QWEN3_4B.vocab_size * QWEN3_4B.hidden if engines * tensor > 1 and learner_ranks > 1 else 0
    )
    assert there.received == pytest.approx(wholes * whole.weights + assembled)
    assert on_host is not None
    assert on_host.received == on_host.weights, "each rank's part is brought to its GPU"


@pytest.mark.parametrize(("nodes", "fewest", "wholes"), [(4, 4, 0.25), (4, 3, 1 / 3), (4, 1, 1.0), (3, 2, 0.5)])
def test_a_learner_that_may_have_fewer_machines_sends_larger_parcels(nodes: int, fewest: int, wholes: float) -> None:
    run = config({"parallel": {"processes": nodes}}, engines=4)
    run = run.model_copy(update={"launch": run.launch.model_copy(update={"learner_nodes": nodes, "learner_nodes_min": fewest})})
    whole, there = (memory_plan(each, QWEN3_4B).engine for each in (config(), run))
    assert whole is not None
    assert there is not None
    assembled = GB // 4 + 2 * QWEN3_4B.vocab_size * QWEN3_4B.hidden if fewest > 1 else 0
    assert there.received == pytest.approx(wholes * whole.weights + assembled)


def test_the_plan_has_the_share() -> None:
    run = config()
    plan = memory_plan(run, QWEN3_600M)
    assert {part.name for part in plan.worker} >= {"KV cache, at least"}
    on_gpu = with_cache(plan, Gpus(count=1, gb=80), 0.25)
    parts = {part.name: part.bytes for part in on_gpu.worker}
    assert total(on_gpu.worker) - parts[RECEIVED] + CONTEXT_BYTES == 20 * GB, "weights are read in place on the only GPU"
    alone = with_cache(plan, Gpus(count=2, gb=80), 0.25)
    assert total(alone.worker) + CONTEXT_BYTES == 20 * GB
    assert "KV cache" in {part.name for part in on_gpu.worker}


@pytest.mark.parametrize(
    ("shape", "learner", "evaluates", "share"),
    [
        pytest.param(QWEN3_600M, {"recompute": "selective"}, True, 0.25, id="0.6B as it is"),
        pytest.param(QWEN3_4B, {"recompute": "full", "lora": {"rank": 16}}, True, 0.25, id="4B with adapters"),
        pytest.param(QWEN3_4B, {"recompute": "full", "optimizer": {"offload": True}}, False, 0.28, id="4B with offload"),
    ],
)
def test_learner_worker_and_evaluator_share_one_gpu(shape: ModelShape, learner: Any, evaluates: bool, share: float) -> None:
    run = config(learner, gpu_share=share)
    run = run if evaluates else run.model_copy(update={"evaluation": run.evaluation.model_copy(update={"every": 0})})
    assert problems(memory_plan(run, shape), Gpus(count=1, gb=80), run) == []


def test_too_large_a_share_is_named_with_the_one_that_fits() -> None:
    one_gpu = Gpus(count=1, gb=80)
    run = config(gpu_share=0.6)
    (shared,) = problems(memory_plan(run, QWEN3_600M), one_gpu, run)
    fits = float(re.findall(r"; lower worker\.gpu_share to (\S+) \(now 0\.6\)$", shared)[0])
    run = config(gpu_share=fits)
    assert problems(memory_plan(run, QWEN3_600M), one_gpu, run) == []
    run = config(gpu_share=fits + 0.01)
    assert problems(memory_plan(run, QWEN3_600M), one_gpu, run)
    run = config(gpu_share=0.01)
    (small,) = problems(memory_plan(run, QWEN3_600M), one_gpu, run)
    assert small.startswith("worker.gpu_share: 0.01 of a GPU of 80.0 GB leaves no room")


def test_an_evaluator_without_room_is_named() -> None:
    run = config({"recompute": "full", "optimizer": {"offload": True}}, gpu_share=0.28)
    (found,) = problems(memory_plan(run, QWEN3_4B), Gpus(count=1, gb=72), run)
    fits = float(re.findall(r"; set evaluation\.every: 0, and lower worker\.gpu_share to (\S+) \(now 0\.28\)$", found)[0])
    run = config({"recompute": "full", "optimizer": {"offload": True}}, gpu_share=fits)
    run = run.model_copy(update={"evaluation": run.evaluation.model_copy(update={"every": 0})})
    assert problems(memory_plan(run, QWEN3_4B), Gpus(count=1, gb=72), run) == []


@pytest.mark.parametrize(
    ("learner", "way_out"),
    [
        ({}, "set learner.optimizer.offload: true"),
        ({"optimizer": {"offload": True}}, "set learner.recompute: full, or train adapters (learner.lora)"),
        ({"recompute": "full", "lora": {"rank": 8}, "optimizer": {"offload": True}}, "take more GPUs, or larger ones"),
    ],
    ids=["moments", "weights", "nothing is left"],
)
def test_on_the_only_gpu_nothing_is_said_of_several(learner: Any, way_out: str) -> None:
    run = config(learner, kv_cache_gb=1)
    run = run.model_copy(update={"batch": run.batch.model_copy(update={"bin_tokens": 1536})})
    (found,) = problems(memory_plan(run, QWEN3_4B), Gpus(count=1, gb=20), run)
    assert found.endswith(f"; {way_out}")
    (found,) = problems(memory_plan(run, QWEN3_4B), Gpus(count=4, gb=16), run)
    assert "raise learner.parallel.tensor (now 1)" in found
