"""Experts by grouped products beside Megatron's experts one by one, on a CPU, for which torch has the product too."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from async_rl.megatron import parallel
from async_rl.megatron.experts.grouped import ALIGNED, GroupedExperts, are_aligned, fits_grouped_products, padded_places
from async_rl.megatron.model import build_model, forward_packed, pack
from async_rl.models.shape import Experts, ModelShape

EXPERTS = Experts(number=8, per_token=2, ffn=24, layers=(0, 1))
SHAPE = ModelShape(
    hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=48, vocab_size=50, max_positions=64, rope_theta=1e4,
    experts=EXPERTS,
)  # fmt: skip


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(0, 50, (length,), generator=generator) for length in (9, 1, 4)]
    logits = forward_packed(model, *pack(rows)).logits()
    (logits.float() * torch.randn(logits.shape, generator=generator)).sum().backward()
    return {"logits": logits.detach(), **{name: each.grad for name, each in model.named_parameters() if each.grad is not None}}


def test_grouped_experts_compute_what_single_ones_do() -> None:
    parallel.initialize(device=torch.device("cpu"))
    found = []
    for grouped in (False, True):
        model = build_model(SHAPE, device=torch.device("cpu"), dtype=torch.bfloat16, seed=1, grouped_experts=grouped)
        assert grouped is any(isinstance(each, GroupedExperts) for each in model.modules())
        found.append(gradients(model))
    single, together = found
    for name, each in together.items():  # an expert without tokens has no gradient alone
        expected = single.get(name, torch.zeros_like(each))
        assert (each - expected).abs().max() <= 0.05 * max(expected.abs().max().item(), 0.01), name
    assert single.keys() <= together.keys()


@pytest.mark.parametrize("counts", [[3, 0, 8, 5], [0, 0, 0], [16]])
def test_groups_begin_at_multiples(counts: list[int]) -> None:
    places, ends, rows = padded_places(torch.tensor(counts), sum(counts))
    starts = [0, *ends.tolist()][: len(counts)]
    assert all(start % ALIGNED == 0 for start in starts)
    assert places.tolist() == [start + each for start, count in zip(starts, counts, strict=True) for each in range(count)]
    assert rows >= ends[-1]
    assert rows % ALIGNED == 0


def test_a_device_without_kernels_computes_experts_one_by_one() -> None:
    assert are_aligned(SHAPE)
    assert not fits_grouped_products(SHAPE, torch.device("cpu"), torch.bfloat16)
