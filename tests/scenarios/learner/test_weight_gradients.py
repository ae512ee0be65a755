"""Gradients of Megatron's matrices are added to buffers in the product: the same ones, and in half precision more precise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from async_rl.megatron import host, parallel
from async_rl.megatron.compat import ColumnParallelLinear, RowParallelLinear
from async_rl.megatron.model import build_model, transformer_config
from async_rl.megatron.parallel import tensor_group
from async_rl.megatron.parameters.full_parameters import bare
from learner.batches.batch import pack_batch
from learner.ranks.rank_group import RankGroup
from tests.support.full_weights import weights_of
from tests.support.learner_rank import CPU, OBJECTIVE, config, shape, taken_groups

LAYERS = 2
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "tied": ({}, 4 * LAYERS),
    "own output layer": ({"tied": False}, 4 * LAYERS),
    "selective": ({"recompute": "selective"}, 4 * LAYERS),
    "full": ({"recompute": "full"}, 4 * LAYERS),
    "experts": ({"experts": 4}, 2 * LAYERS + 2 + 4 * 2),
    "frozen, with adapters": ({"lora": {"rank": 4}}, 0),
    "bfloat16 on a CPU": ({"precision": "bfloat16"}, 0),
}
Linear = ColumnParallelLinear | RowParallelLinear


def adding(rank_group: RankGroup) -> list[Linear]:
    """The layers that add to buffers themselves."""
    layers = [each for each in rank_group.model.chunks.modules() if isinstance(each, Linear)]
    return [each for each in layers if each.gradient_accumulation_fusion]


def gradients(rank_group: RankGroup) -> dict[str, Tensor]:
    """The gradients of a step of several rows, after which the weights are what they were."""
    before = weights_of(rank_group)
    batch = pack_batch(taken_groups(1), objective=OBJECTIVE, capacity=30)
    assert len(batch.minibatches[0].shards[0]) > 2
    rank_group.step(batch)
    trained = {name: each for name, each in bare(rank_group.model.chunks[0]).named_parameters() if hasattr(each, "main_grad")}
    found = {name: each.main_grad.clone() for name, each in trained.items()}
    rank_group.model.load(before)
    return found


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_that_are_made_and_then_added(case: str) -> None:
    settings, layers = CASES[case]
    under = config(clip_grad=0, layers=LAYERS, **settings)
    rank_group = RankGroup(under, OBJECTIVE, shape(under))
    found = gradients(rank_group)
    assert len(adding(rank_group)) == layers
    if not layers:
        rank_group.stop()
        return
    for each in adding(rank_group):
        assert each.weight.grad_added_to_main_grad
        each.gradient_accumulation_fusion = False
    wanted = gradients(rank_group)
    rank_group.stop()
    assert found.keys() == wanted.keys()
    assert any(each.norm() > 0 for each in wanted.values())
    for name, each in found.items():
        assert (each - wanted[name]).norm() <= 1e-6 * wanted[name].norm(), name


def test_in_half_precision_nothing_is_rounded_between_rows() -> None:
    parallel.initialize(device=CPU)
    model = build_model(shape(config()), device=CPU, dtype=torch.bfloat16, seed=1)
    layer: Any = model.decoder.layers[0].mlp.linear_fc2
    generator = torch.Generator().manual_seed(3)
    out, width = layer.weight.shape
    rows = [[torch.randn(40, 1, size, generator=generator).bfloat16() for size in (width, out)] for _ in range(5)]
    precise = sum(gradient[:, 0].double().T @ given[:, 0].double() for given, gradient in rows)

    errors = []
    for is_fused in (False, True):
        layer.weight.main_grad, layer.gradient_accumulation_fusion = torch.zeros(out, width), is_fused
        for given, gradient in rows:
            layer(given)[0].backward(gradient)
            if layer.weight.grad is not None:  # as the hook of Megatron's gradient buffers does
                layer.weight.main_grad += layer.weight.grad
                layer.weight.grad = None
        errors.append(((layer.weight.main_grad - precise).norm() / precise.norm()).item())
    assert errors[1] < 1e-6 < 1e-4 < errors[0]


def test_a_layer_that_is_to_add_can_be_built() -> None:
    """As the output layer that Megatron makes beside Transformer Engine's layers, and refuses to make without Apex."""
    parallel.initialize(device=CPU)
    with host.quiet():
        made = transformer_config(shape(config()), device=CPU, dtype=torch.float32)
    made.gradient_accumulation_fusion = True
    layer = ColumnParallelLinear(8, 16, config=made, init_method=made.init_method, bias=False, tp_group=tensor_group())
    assert layer.gradient_accumulation_fusion
