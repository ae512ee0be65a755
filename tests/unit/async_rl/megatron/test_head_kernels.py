"""Norm and rotation of heads as kernels, in Triton's interpreter, alone and in a model."""

from __future__ import annotations

import torch

from async_rl.megatron.attention.paged_attention import GatheringSelfAttention, TritonSelfAttention
from async_rl.megatron.attention.self_attention import SelfAttentionOfLayer
from tests.support.interpreted import interpreted


def test_the_kernels_compute_what_torch_does() -> None:
    found = interpreted("tests.unit.async_rl.megatron.head_cases")
    assert len(found["kernels"]) == 10
    for name, difference in found["kernels"].items():
        assert difference < (1e-6 if "float32" in name else 2**-6), name
    assert len(found["models"]) == 4
    for name, difference in found["models"].items():
        assert difference < 1e-5, name


def test_a_device_without_kernels_computes_with_torch() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert not SelfAttentionOfLayer.uses_kernels(cpu)
    assert SelfAttentionOfLayer.uses_kernels(gpu)
    assert not GatheringSelfAttention.uses_kernels(gpu), "worker.kernels: torch"
    assert TritonSelfAttention.uses_kernels(gpu)
