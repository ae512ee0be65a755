"""Experts by grouped products beside Megatron's experts one by one, on a CPU, for which torch has the product too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from async_rl.megatron import parallel
from async_rl.megatron.experts.grouped import ALIGNED, GroupedExperts, are_aligned, fits_grouped_products, padded_places
from async_rl.megatron.experts.sharing import share_tokens
from async_rl.megatron.model import build_model, forward_packed, pack
from async_rl.models.shape import Experts, ModelShape
from tests.support.device_reads import DeviceReads

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


def layer_of(dtype: torch.dtype, *, grouped: bool, in_engine: bool) -> Any:
    parallel.initialize(device=torch.device("cpu"))
    model = build_model(SHAPE, device=torch.device("cpu"), dtype=dtype, seed=1, grouped_experts=grouped).eval()
    if in_engine:
        share_tokens(model)
    return model.decoder.layers[0].mlp


def some_tokens(count: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(count, 1, SHAPE.hidden, generator=torch.Generator().manual_seed(2)).to(dtype)


@pytest.mark.parametrize("count", [1, 7, 64])
def test_an_engine_gives_experts_the_tokens_that_megatron_dispatches(count: int) -> None:
    given = some_tokens(count, torch.float32)
    with torch.inference_mode():
        found, expected = (layer_of(torch.float32, grouped=False, in_engine=each)(given)[0] for each in (True, False))
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("grouped", "in_engine", "waits"), [(True, True, False), (True, False, True), (False, True, True)])
def test_grouped_experts_of_an_engine_wait_for_nothing_and_can_be_a_graph(grouped: bool, in_engine: bool, waits: bool) -> None:
    layer, given = layer_of(torch.bfloat16, grouped=grouped, in_engine=in_engine), some_tokens(6, torch.bfloat16)
    with torch.inference_mode():
        layer(given)
        with DeviceReads([given, *layer.parameters(), *layer.buffers()]) as reads:
            layer(given)
    assert bool(reads.places) is waits
