"""Which engines decode through CUDA graphs, and which are refused by name."""

from dataclasses import replace
from typing import Any

import pytest

from async_rl.errors import ConfigError
from async_rl.models.engine_limits import uses_cuda_graphs
from async_rl.models.shape import Experts, ModelShape

SHAPE = ModelShape(
    hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=64, vocab_size=40, max_positions=64, rope_theta=1e4
)
OF_EXPERTS = replace(SHAPE, experts=Experts(number=4, per_token=2, ffn=16, layers=(1,)))
PLAIN: dict[str, Any] = {"on_gpu": True, "kernels": "auto", "layer_spec": "local", "tensor": 1}


@pytest.mark.parametrize(
    ("wanted", "on_gpu", "expected"),
    [
        ("auto", True, True),
        ("auto", False, False),
        ("always", True, True),
        ("always", False, True),
        ("never", True, False),
        ("never", False, False),
    ],
)
def test_graphs_are_for_gpus_and_dry_runs(wanted: str, on_gpu: bool, expected: bool) -> None:
    assert uses_cuda_graphs(SHAPE, wanted=wanted, **{**PLAIN, "on_gpu": on_gpu}) is expected


@pytest.mark.parametrize(
    ("shape", "changed", "reason"),
    [
        (SHAPE, {"tensor": 2}, r"worker\.tensor is 2"),
        (SHAPE, {"layer_spec": "transformer_engine"}, r"model\.layer_spec is transformer_engine"),
        (SHAPE, {"kernels": "torch"}, r"worker\.kernels is torch"),
        (OF_EXPERTS, {"grouped_experts": False}, "the model's experts are computed one by one here"),
    ],
)
def test_what_cannot_be_a_graph_decodes_without_or_is_refused(shape: ModelShape, changed: dict[str, Any], reason: str) -> None:
    assert not uses_cuda_graphs(shape, wanted="auto", **{**PLAIN, **changed})
    with pytest.raises(ConfigError, match=rf"worker\.cuda_graphs: always cannot be, because {reason}.*; auto decodes without"):
        uses_cuda_graphs(shape, wanted="always", **{**PLAIN, **changed})


def test_experts_that_are_computed_at_once_can_be_a_graph_and_on_a_cpu_all_can() -> None:
    assert uses_cuda_graphs(OF_EXPERTS, wanted="auto", **PLAIN, grouped_experts=True)
    assert uses_cuda_graphs(OF_EXPERTS, wanted="always", **{**PLAIN, "on_gpu": False}, grouped_experts=False)
    assert uses_cuda_graphs(SHAPE, wanted="auto", **PLAIN, grouped_experts=False)
