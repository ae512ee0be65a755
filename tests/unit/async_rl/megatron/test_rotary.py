"""The rotary embedding of packed rows: Megatron's formula, once for all sequences and layers."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from async_rl.megatron import parallel
from async_rl.megatron.attention.rope_scaling import attention_factor
from async_rl.megatron.attention.rotary import Rotation
from async_rl.megatron.attention.row_packing import RowPacking
from async_rl.megatron.compat import attention_module
from async_rl.megatron.model import ComputeOptions, Recompute, build_chunks, forward_packed, pack
from async_rl.megatron.parallel import context_group
from async_rl.models.rope import RopeScaling
from async_rl.models.shape import ModelShape, Window
from tests.support.operations import Operations

CPU = torch.device("cpu")
SHAPE = ModelShape(
    hidden=32, layers=3, heads=4, kv_heads=2, head_dim=8, ffn=48, vocab_size=19, max_positions=64, rope_theta=1e4, init_std=0.2
)  # fmt: skip
YARN = RopeScaling(kind="yarn", factor=4.0, original_positions=16, attention_factor=1.25)
TWO_THETAS = Window(tokens=4, layers=(0, 2), rope_theta=100.0)


@pytest.fixture(autouse=True)
def alone() -> None:
    parallel.initialize(device=CPU)


def rows(*lengths: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(0, SHAPE.vocab_size, (length,), generator=generator) for length in lengths]


@pytest.mark.parametrize("scaling", [None, YARN], ids=["plain", "yarn"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_rotated_to_the_bit_as_megatron_rotates_their_sequences(
    scaling: RopeScaling | None, dtype: torch.dtype
) -> None:
    (model,) = build_chunks(replace(SHAPE, rope_scaling=scaling), device=CPU, dtype=torch.float32, seed=1)
    _, positions, packing = pack(rows(5, 1, 9))
    angles = torch.outer(torch.arange(9.0), 1e4 ** -torch.linspace(0, 1, 5)[:4]).repeat(1, 2)[:, None, None]
    heads = torch.randn(15, 1, 4, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    factor = attention_factor(model.config)
    theirs = attention_module.apply_rotary_pos_emb(
        heads[:, 0], angles, model.config, packing.cu_seqlens_q, mscale=factor, cp_group=context_group()
    )  # fmt: skip
    ours = replace(packing, positions=positions).rotation(0, angles, dtype, factor).turn(heads)[:, 0]
    assert torch.equal(ours, theirs)


def test_gradients_are_turned_back() -> None:
    angles = torch.randn(3, 1, 1, 2, dtype=torch.float64).repeat(1, 1, 1, 2)
    rotation = Rotation.by(angles, torch.float64, factor=1.5)
    heads = torch.randn(3, 1, 2, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(rotation.turn, (heads,))
    with torch.no_grad():
        without = rotation.turn(heads)
    assert torch.equal(rotation.turn(heads), without)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("shape", [SHAPE, replace(SHAPE, window=TWO_THETAS)], ids=["one theta", "two thetas"])
def test_a_row_of_many_sequences_costs_no_more_operations_than_one_of_few(shape: ModelShape, recompute: Recompute) -> None:
    (model,) = build_chunks(shape, device=CPU, dtype=torch.float32, seed=1, compute=ComputeOptions(recompute=recompute))
    found: list[Counter[str]] = []
    for sequences in (2, 2, 12):  # the first pass warms up
        row = pack(rows(*[5] * sequences))
        with Operations() as counted:
            forward_packed(model, *row).logits().sum().backward()
        found.append(counted.calls)
    _, few, many = found
    assert few == many
    angles = 1 if shape.window is None else 2
    assert many["aten.cos.default"] == angles, "cosines are computed once for all layers of a kind, recomputed ones too"


def test_a_packing_keeps_no_rotations_between_passes() -> None:
    (model,) = build_chunks(SHAPE, device=CPU, dtype=torch.float32, seed=1)
    ids, positions, packing = pack(rows(5, 3))
    assert isinstance(packing, RowPacking)
    with torch.no_grad():
        forward_packed(model, ids, positions, packing)
    assert not packing.rotations
