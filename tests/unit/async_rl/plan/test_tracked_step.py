"""The plan beside a real step of a learner, whose live tensors are counted."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import pytest
import torch

from async_rl.config import Config
from async_rl.config.rollout import WorkerConfig
from async_rl.megatron import parallel
from async_rl.megatron.experts.sharing import share_tokens
from async_rl.megatron.model import build_model
from async_rl.models.shape import Experts, ModelShape
from async_rl.plan.memory import memory_plan, total
from async_rl.plan.parameters import CHUNK
from async_rl.plan.worker import CONTEXT_BYTES, engine_memory
from tests.support.repository import ROOT

CPU = torch.device("cpu")
SHAPE = ModelShape(
    hidden=256, layers=4, heads=4, kv_heads=2, head_dim=64, ffn=1024, vocab_size=1000, max_positions=512, rope_theta=1e4,
    qk_norm=True,
)  # fmt: skip
CASES: dict[str, tuple[ModelShape, dict[str, Any]]] = {
    "logits are the highest moment": (replace(SHAPE, vocab_size=4000), {}),
    "logits in chunks are": (replace(SHAPE, vocab_size=4000, ffn=256), {"logits_gb": 0.01}),
    "layers are": (replace(SHAPE, vocab_size=21, qk_norm=False), {}),
    "selective": (SHAPE, {"recompute": "selective"}),
    "full": (SHAPE, {"recompute": "full"}),
    "experts": (replace(SHAPE, experts=Experts(number=4, per_token=2, ffn=256, layers=(0, 1, 2, 3))), {}),
}


def run(learner: dict[str, Any]) -> Config:
    return Config.model_validate(
        {
            "model": {"size": {"hidden": 8, "layers": 1, "heads": 1}},
            "environments": [{"type": "even_digits"}],
            "batch": {"bin_tokens": 512},
            "learner": learner,
            "device": "cpu",
        }
    )


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    parallel.shutdown()  # another test's groups may have other sizes


def compare(shape: ModelShape, learner: dict[str, Any], *, has_values: bool = True) -> None:
    """Assert that the plan fits what a step takes, and what it adds to weights, gradients and optimizer."""
    from memory_parts.tracked_step import tracked_step

    found = tracked_step(run(learner), shape, [128] * 4, has_values=has_values)
    parts = memory_plan(run(learner), shape).learner
    state = total(part for part in parts if part.name in ("weights", "gradients", "optimizer"))
    assert total(parts) == pytest.approx(found.peak, rel=0.05)
    assert total(parts) - state == pytest.approx(found.peak - state, rel=0.15), found.largest[:8]


@pytest.mark.parametrize("case", CASES)
def test_a_real_step_takes_what_is_planned(case: str) -> None:
    compare(*CASES[case])


@pytest.mark.parametrize("ffn", [64, 512], ids=["narrow", "wide"])
def test_experts_of_an_engine_take_what_is_planned(ffn: int) -> None:
    """All of a layer computed together, as on a GPU; the plan also has the residual, and no padding."""
    from memory_parts.live_tensors import LiveTensors

    parallel.initialize(device=CPU)
    experts, tokens = Experts(number=4, per_token=4, ffn=ffn, layers=(0,)), 500
    shape = replace(SHAPE, layers=1, ffn=64, experts=experts)
    model = build_model(shape, device=CPU, dtype=torch.bfloat16, seed=None, grouped_experts=True).eval()
    share_tokens(model)
    layer: Any = model.decoder.layers[0].mlp
    with torch.inference_mode(), LiveTensors() as live:
        given = torch.zeros(tokens, 1, shape.hidden).bfloat16()
        layer(given)
        before = live.live  # the weights and the layer's input
        live.restart()
        layer(given)
    worker = WorkerConfig(prompt_tokens_per_step=tokens)
    planned = engine_memory(shape, worker, element=2, running=0, on_cpu=False).activations
    assert planned - 2 * given.nbytes == pytest.approx(max(live.peaks.values()) - before, rel=0.08)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("model", "offload"), [("QWEN3", False), ("QWEN3_4B", True)])
def test_a_row_of_32k_tokens_of_a_real_model_fits_80_gb(model: str, offload: bool) -> None:
    """Counted on tensors without values, as they are on a CPU, whose layers keep more. Two packed versions lie beside them."""
    from memory_parts.tracked_step import tracked_step

    memory = importlib.import_module("memory")
    shape, row = replace(getattr(memory, model), tied_embeddings=True), 32_768
    found = tracked_step(
        memory.config(row, {"precision": "bfloat16", "recompute": "full"}), shape, [row // 4] * 4, has_values=False
    )
    weights = {part.name: part.bytes for part in memory_plan(memory.config(row, {"precision": "bfloat16"}), shape).learner}[
        "weights"
    ]
    moments = 2 * 2 * weights  # of float32, for weights of bfloat16
    on_gpu = found.peak - (moments - 2 * CHUNK if offload else 0)
    assert on_gpu + 2 * weights + CONTEXT_BYTES < 80 * 2**30
