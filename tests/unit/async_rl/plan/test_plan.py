"""The memory plan: how ranks divide a model, and what does not fit on given GPUs."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import pytest

from async_rl.config import Config
from async_rl.config.learner import LoraConfig, ParallelConfig
from async_rl.config.training import METHODS, TrainingConfig
from async_rl.errors import ConfigError
from async_rl.megatron.parameters.adapters import trained_rows
from async_rl.megatron.parameters.table import table
from async_rl.models.shape import Experts, ModelShape
from async_rl.plan.gpus import Gpus, placed, problems
from async_rl.plan.memory import memory_plan, total, training_plan
from async_rl.plan.parameters import CHUNK, held_by_stages, trained_bytes

SHAPE = ModelShape(
    hidden=1024, layers=28, heads=16, kv_heads=8, head_dim=128, ffn=3072, vocab_size=151936, max_positions=4096,
    rope_theta=1e6, qk_norm=True, tied_embeddings=False,
)  # fmt: skip


def config(**sections: Any) -> Config:
    return Config.model_validate(
        {"model": {"size": {"hidden": 64, "layers": 2, "heads": 4}}, "environments": [{"type": "even_digits"}]} | sections
    )


def test_parameters_are_divided_as_the_ranks_are() -> None:
    numbers = sum(prod(row.shape) for row in table(SHAPE))
    assert trained_bytes(SHAPE, ParallelConfig()) == 18 * numbers
    assert trained_bytes(SHAPE, ParallelConfig(processes=4)) == (6 + 12 / 4) * numbers
    assert 9 * numbers < trained_bytes(SHAPE, ParallelConfig(tensor=2)) < 9.1 * numbers, "norms are whole on both"
    assert trained_bytes(SHAPE, ParallelConfig(), weight=4) == 16 * numbers, "no float32 copies"


def test_adapters_save_gradients_and_optimizer_of_the_rest() -> None:
    whole = sum(prod(row.shape) for row in table(SHAPE))
    adapted = sum(prod(row.shape) for row in table(SHAPE) if "linear" in row.name)
    lora = LoraConfig(rank=2)
    factors = sum(prod(row.shape) for row in trained_rows(SHAPE, lora))
    assert trained_bytes(SHAPE, ParallelConfig(), lora=lora) == 2 * (whole + adapted) + 16 * factors
    plans = [memory_plan(config(learner={"lora": each}), SHAPE, reference=SHAPE) for each in (None, {"rank": 2})]
    parts = [{part.name: part.bytes for part in plan.learner} for plan in plans]
    assert parts[0]["frozen models"] == 2 * whole
    assert "frozen models" not in parts[1], "the base is the reference"
    assert parts[1]["gradients"] == 4 * factors


def test_gpus_are_written_as_a_number_and_a_size() -> None:
    assert Gpus.parse("8x80") == Gpus(count=8, gb=80)
    assert Gpus.parse("1x24gb") == Gpus(count=1, gb=24)
    for nonsense in ("", "80", "0x80", "8x0", "8x", "x80", "8 x eighty", "-1x80"):
        with pytest.raises(ConfigError, match="as in 8x80"):
            Gpus.parse(nonsense)


def test_what_does_not_fit_is_named_with_the_setting_to_change() -> None:
    run = config(batch={"bin_tokens": 16_384})
    plan = memory_plan(run, SHAPE)
    assert problems(plan, Gpus(count=2, gb=160), run) == []
    (shared,) = problems(plan, Gpus(count=1, gb=8), run)
    assert "GPU 0 has 8 GB, and the learner and worker 0 need" in shared
    assert "batch.bin_tokens" in shared
    (missing,) = problems(memory_plan(wide := config(learner={"parallel": {"tensor": 4}}), SHAPE), Gpus(count=2, gb=80), wide)
    assert missing.startswith("learner.parallel: the learner needs 4 GPUs")


def test_rows_of_32k_tokens_fit_80_gb() -> None:
    rows: dict[str, Any] = {"batch": {"bin_tokens": 32_768}}
    small = config(**rows, learner={"recompute": "full"})
    assert problems(memory_plan(small, replace(SHAPE, tied_embeddings=True)), Gpus(count=1, gb=80), small) == []
    qwen3_4b = replace(SHAPE, hidden=2560, layers=36, heads=32, ffn=9728, tied_embeddings=True)
    plain, offloaded = (
        config(**rows, learner={"recompute": "full", "optimizer": {"offload": each}}, worker={"tensor": 2})
        for each in (False, True)
    )
    assert len(problems(memory_plan(plain, qwen3_4b), Gpus(count=3, gb=80), plain)) == 1
    assert problems(memory_plan(offloaded, qwen3_4b), Gpus(count=3, gb=80), offloaded) == []


def test_offloaded_moments_come_in_chunks() -> None:
    shape = replace(SHAPE, vocab_size=1000)
    (held,) = held_by_stages(shape, ParallelConfig())
    assert held.update_bytes(offload=False) == 0
    assert held.update_bytes(offload=True) == 2 * CHUNK
    (large,) = held_by_stages(SHAPE, ParallelConfig())
    assert large.update_bytes(offload=True) == CHUNK + 8 * SHAPE.vocab_size * SHAPE.hidden


def test_what_learner_ranks_keep_on_the_host_is_planned() -> None:
    numbers = sum(prod(row.shape) for row in table(SHAPE))

    def host(run: Config | TrainingConfig) -> dict[str, int]:
        plan = memory_plan(run, SHAPE) if isinstance(run, Config) else training_plan(run, SHAPE)
        return {part.name: part.bytes for part in plan.host}

    resident, offloaded, divided = (
        host(config(learner={"optimizer": {"offload": each}, "parallel": {"processes": ranks}}))
        for each, ranks in ((False, 1), (True, 1), (True, 4))
    )
    assert "optimizer's moments" not in resident
    assert offloaded["optimizer's moments"] == 8 * numbers
    assert divided == offloaded, "of all ranks together"
    assert resident["checkpoint"] == offloaded["checkpoint"] == 12 * numbers
    adapted = host(config(learner={"optimizer": {"offload": True}, "lora": {"rank": 2}}))
    factors = sum(prod(row.shape) for row in trained_rows(SHAPE, LoraConfig(rank=2)))
    assert (adapted["optimizer's moments"], adapted["checkpoint"]) == (8 * factors, 12 * factors)
    beside = host(config(learner={"critic": {"type": "own", "optimizer": {"offload": True}}}))
    scalar = sum(prod(row.shape) for row in table(SHAPE.with_head("scalar")))
    assert (beside["optimizer's moments"], beside["checkpoint"]) == (8 * scalar, 12 * (numbers + scalar))
    sft = METHODS["sft"].model_validate(
        {
            "model": {"size": {"hidden": 64, "layers": 2, "heads": 4}},
            "data": {"path": "rows.jsonl"},
            "learner": {"optimizer": {"offload": True}},
        }
    )
    assert host(sft) == {"optimizer's moments": 8 * numbers, "checkpoint": 12 * numbers}


def test_layers_without_kernels_keep_more() -> None:
    fused, apart = (
        {part.name: part.bytes for part in memory_plan(config(learner={"kernels": each}), SHAPE).learner}
        for each in ("auto", "torch")
    )
    row = 2 * 4096
    more = row * SHAPE.layers * (2 * SHAPE.ffn + SHAPE.heads * SHAPE.head_dim)
    assert apart["activations"] - fused["activations"] == more
    assert {**apart, "activations": 0} == {**fused, "activations": 0}


def test_workers_take_the_gpus_behind_the_learner() -> None:
    plan = memory_plan(config(worker={"processes": 2}), SHAPE)
    assert [list(each) for each in placed(plan, Gpus(count=3, gb=80))] == [["the learner"], ["worker 0"], ["worker 1"]]
    apart, beside = placed(plan, Gpus(count=2, gb=80))
    assert list(apart) == ["the learner", "worker 0"]
    assert total(apart["worker 0"]) < total(beside["worker 1"]), "beside the learner weights are read in place"
    copied = memory_plan(config(worker={"processes": 2}, wire={"shared_memory": False}), SHAPE)
    assert total(placed(copied, Gpus(count=2, gb=80))[0]["the learner"]) == total(apart["the learner"])
    (only,) = placed(copied, Gpus(count=1, gb=80))
    (shared,) = placed(plan, Gpus(count=1, gb=80))
    assert total(only["worker 0"]) > total(shared["worker 0"]), "without shared memory they are copied"


def test_a_model_with_experts_divides_them_alone() -> None:
    experts = Experts(number=8, per_token=2, ffn=512, layers=tuple(range(28)))
    shape = ModelShape(
        hidden=512, layers=28, heads=8, kv_heads=8, head_dim=64, ffn=2048, vocab_size=1000, max_positions=512,
        rope_theta=1e4, experts=experts,
    )  # fmt: skip
    of_experts = sum(prod(row.shape) for row in table(shape) if row.expert is not None)
    others = sum(prod(row.shape) for row in table(shape) if row.expert is None)
    assert trained_bytes(shape, ParallelConfig(expert=4)) == (6 + 12) * of_experts / 4 + (6 + 12 / 4) * others
    of_worker = {
        expert: memory_plan(config(worker={"tensor": 4, "expert": expert}), shape).worker[0].bytes for expert in (1, 2, 4)
    }
    assert of_worker[1] - of_worker[2] == 2 * of_experts / 2
    assert of_worker[1] - of_worker[4] == 2 * of_experts * 3 / 4


@pytest.mark.parametrize(("device", "element"), [("cuda", 2), ("cpu", 0)])
def test_gradients_of_a_layers_experts_are_made_at_once_on_a_gpu(device: str, element: int) -> None:
    """Their number changes nothing that a token makes. The vocabulary is small: the highest moment is that of a layer."""
    learner = {"parallel": {"expert": 2, "processes": 2}, "recompute": "full"}
    run, planned = config(device=device, learner=learner), list[int]()
    for number in (8, 16):
        shape = replace(SHAPE, vocab_size=100, experts=Experts(number=number, per_token=2, ffn=64, layers=(0, 1)))
        planned += [part.bytes for part in memory_plan(run, shape).learner if part.name == "activations"]
    assert planned[1] - planned[0] == element * (16 - 8) / 2 * 2 * 64 * SHAPE.hidden
