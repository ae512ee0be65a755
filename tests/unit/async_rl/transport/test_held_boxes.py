"""What ranks hold of a model, however it is divided, is all of it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.megatron.parameters.full_parameters import boxes_of, slice_for, specs
from async_rl.megatron.parameters.table import EMBEDDING, Parameter, table
from async_rl.models.shape import Experts, ModelShape
from async_rl.transport.packed_versions import PackedVersions
from async_rl.transport.plan import Box, WireLayout, plan_layout
from async_rl.transport.receiving.received_weights import ReceivedWeights

CPU = torch.device("cpu")
Held = dict[int, dict[Box, torch.Tensor]]


@dataclass(frozen=True, kw_only=True)
class Division:
    tensor: int = 1
    pipeline: int = 1
    chunks: int = 1
    expert: int = 1
    data: int = 1

    @property
    def ranks(self) -> int:
        return self.tensor * self.data * self.pipeline

    def has(self, rank: int, row: Parameter, shape: ModelShape) -> bool:
        """As Megatron numbers ranks: tensor first, then data, then pipeline; experts go around the ranks of a stage."""
        stage, within = divmod(rank, self.tensor * self.data)
        if row.expert is not None:
            assert shape.experts is not None
            if row.expert * self.expert // shape.experts.number != within % self.expert:
                return False
        if row.layer is not None:
            return row.layer * self.pipeline * self.chunks // shape.layers % self.pipeline == stage
        first, last = stage == 0, stage == self.pipeline - 1
        return (first or (last and shape.tied_embeddings)) if row.name == EMBEDDING else last


def held_by_all(shape: ModelShape, division: Division, tensors: Mapping[str, torch.Tensor]) -> Held:
    tensor = division.tensor
    return {
        rank: {
            box: part
            for row in table(shape)
            if division.has(rank, row, shape)
            for box, part in boxes_of(
                row, slice_for(tensors[row.name], row.split, rank % tensor, tensor), rank % tensor, tensor
            )
        }
        for rank in range(division.ranks)
    }


def laid_out(shape: ModelShape, held: Held) -> WireLayout:
    return plan_layout(specs(shape, torch.float32), {rank: list(boxes) for rank, boxes in held.items()})


@st.composite
def divided(draw: st.DrawFn) -> tuple[ModelShape, Division]:
    tensor, pipeline, data = draw(st.sampled_from([(t, p, d) for t in (1, 2, 4) for p in (1, 2, 3) for d in (1, 2, 3)]))
    chunks = draw(st.sampled_from([1, 2])) if pipeline > 1 else 1
    layers = pipeline * chunks * draw(st.integers(1, 2))
    expert = draw(st.sampled_from([size for size in range(1, tensor * data + 1) if tensor * data % size == 0]))
    experts = Experts(
        number=expert * draw(st.integers(1, 3)), per_token=1, ffn=3,
        layers=tuple(sorted(draw(st.sets(st.integers(0, layers - 1))))),
    )  # fmt: skip
    shape = ModelShape(
        hidden=draw(st.integers(1, 4)), layers=layers, heads=4, kv_heads=4, head_dim=draw(st.integers(1, 3)),
        ffn=tensor * draw(st.integers(1, 5)), vocab_size=draw(st.integers(1, 300)), max_positions=8, rope_theta=1e4,
        qkv_bias=draw(st.booleans()), qk_norm=draw(st.booleans()), tied_embeddings=draw(st.booleans()),
        experts=experts if draw(st.booleans()) else None,
    )  # fmt: skip
    return shape, Division(tensor=tensor, pipeline=pipeline, chunks=chunks, expert=expert, data=data)


@settings(max_examples=60)
@given(divided())
def test_what_ranks_send_is_the_model(case: tuple[ModelShape, Division]) -> None:
    shape, division = case
    tensors = {row.name: torch.randn(row.shape) for row in table(shape)}
    held = held_by_all(shape, division, tensors)
    layout = laid_out(shape, held)
    parcels: list[torch.Tensor] = []
    for parcel in layout.parcels:
        versions = PackedVersions(layout, parcel, CPU, shared=False)
        versions.add(1, held[parcel.sender], keep=())
        parcels.append(versions.parcel(1))
    received = ReceivedWeights(layout, parcels)
    assert [*received] == [*tensors]
    assert [name for name, tensor in tensors.items() if not torch.equal(received[name], tensor)] == []
    assert sum(each.num_bytes for parcel in layout.parcels for each in parcel.slices) == layout.num_bytes


def test_a_large_model_is_laid_out_in_a_moment() -> None:
    """Qwen3-235B-A22B. The limits are far from what it takes: they are here for what grows with the square."""
    shape = ModelShape(
        hidden=4096, layers=94, heads=64, kv_heads=4, head_dim=128, ffn=12288, vocab_size=151936, max_positions=40960,
        rope_theta=1e6, qk_norm=True, tied_embeddings=False,
        experts=Experts(number=128, per_token=8, ffn=1536, layers=tuple(range(94))),
    )  # fmt: skip
    division = Division(tensor=4, pipeline=2, expert=8, data=2)
    held = held_by_all(shape, division, {row.name: torch.empty(row.shape, device="meta") for row in table(shape)})
    before = time.process_time()
    layout = laid_out(shape, held)
    assert WireLayout.from_json(layout.to_json()).digest == layout.digest
    assert time.process_time() - before < 5
    assert len(layout.to_json()) < 10_000_000
    loads = [parcel.num_bytes for parcel in layout.parcels]
    assert len(loads) == division.ranks
    assert max(loads) < 1.001 * sum(loads) / len(loads)
