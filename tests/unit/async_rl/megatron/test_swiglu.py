"""SwiGLU as one kernel: the kernels in Triton's interpreter, and the module in Megatron's MLPs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from async_rl.megatron import host, parallel
from async_rl.megatron.layers.specs import LayerSpec
from async_rl.megatron.layers.swiglu import FusedSwiglu, fuses_swiglu
from async_rl.megatron.model import build_model, forward_packed, pack, transformer_config
from async_rl.models.shape import Experts, ModelShape
from tests.support.interpreted import interpreted

SHAPE = ModelShape(
    hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=48, vocab_size=50, max_positions=64, rope_theta=1e4
)
EXPERTS = Experts(number=4, per_token=2, ffn=24, layers=(1,), shared_ffn=40)


def test_the_kernels_compute_what_torch_does() -> None:
    found = interpreted("tests.unit.async_rl.megatron.swiglu_cases")
    assert len(found) == 6
    for name, difference in found.items():
        assert difference < (1e-5 if "float32" in name else 2**-7), name


def test_a_device_without_kernels_has_no_fusion() -> None:
    assert not fuses_swiglu(SHAPE, torch.device("cpu"))
    assert fuses_swiglu(SHAPE, torch.device("cuda"))
    assert not fuses_swiglu(replace(SHAPE, activation="gelu_tanh"), torch.device("cuda"))


@pytest.mark.parametrize("shape", [SHAPE, replace(SHAPE, experts=EXPERTS)], ids=["dense", "experts"])
def test_every_mlp_calls_the_module(shape: ModelShape) -> None:
    parallel.initialize(device=torch.device("cpu"))
    logits = []
    for fused in (False, True):
        model = build_model(shape, device=torch.device("cpu"), dtype=torch.float32, seed=1, fused_swiglu=fused)
        assert fused is any(isinstance(each, FusedSwiglu) for each in model.modules())
        logits.append(forward_packed(model, *pack([torch.arange(9), torch.arange(4)])).logits())
    torch.testing.assert_close(*logits)


@pytest.mark.parametrize("spec", ["local", "transformer_engine"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_gradients_are_accumulated_by_layers_that_can(device: str, spec: LayerSpec) -> None:
    parallel.initialize(device=torch.device("cpu"))
    with host.quiet():
        config = transformer_config(SHAPE, device=torch.device(device), dtype=torch.bfloat16, layer_spec=spec)
    assert config.gradient_accumulation_fusion is (device == "cuda" and spec == "transformer_engine")
    assert not any([config.apply_rope_fusion, config.bias_activation_fusion, config.persist_layer_norm])
