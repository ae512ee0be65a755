"""The plan of the wire: every element in exactly one parcel, however the learner divides its model; equal loads."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from async_rl.errors import WireError
from async_rl.models.parameter_spec import ParameterSpec
from async_rl.transport.digest import digest_of, specs_of, version_digest
from async_rl.transport.packed_versions import PackedVersions
from async_rl.transport.plan import ALIGNMENT, Box, WireLayout, describe_mismatch, plan_layout, size_of
from async_rl.transport.receiving.received_weights import ReceivedWeights

CPU = torch.device("cpu")


def spec(name: str, *shape: int, dtype: str = "float32") -> ParameterSpec:
    return ParameterSpec(name=name, shape=shape, dtype=dtype)


def carried(layout: WireLayout, tensors: Mapping[str, torch.Tensor], held: Mapping[int, Sequence[Box]]) -> ReceivedWeights:
    """Packed by every rank from what it holds, and put together by a worker."""
    parcels: list[torch.Tensor] = []
    for parcel in layout.parcels:
        versions = PackedVersions(layout, parcel, CPU, shared=False)
        own = {box: _part(tensors[box.name], box) for box in held[parcel.sender]}
        versions.add(1, own, keep=())
        digests, _ = versions.describe(1)
        assert len(digests) == parcel.num_chunks
        parcels.append(versions.parcel(1))
    return ReceivedWeights(layout, parcels)


def _part(full: torch.Tensor, box: Box) -> torch.Tensor:
    return full[tuple(slice(first, first + size) for first, size in zip(box.start, box.shape, strict=True))]


@st.composite
def divided(draw: st.DrawFn) -> tuple[dict[str, torch.Tensor], dict[int, list[Box]]]:
    """Parameters in boxes of rows or columns, each on one to four of up to five ranks."""
    ranks = draw(st.integers(1, 5))
    tensors: dict[str, torch.Tensor] = {}
    held: dict[int, list[Box]] = {rank: [] for rank in range(ranks)}
    for number in range(draw(st.integers(0, 8))):
        shape = tuple(draw(st.lists(st.integers(0, 40), max_size=3)))
        dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]))
        name = f"p{number}"
        tensors[name] = torch.randint(0, 2, shape).to(dtype) if dtype is torch.bool else torch.randn(shape).mul(9).to(dtype)
        dimension = draw(st.integers(0, len(shape) - 1)) if shape else 0
        parts = draw(st.integers(1, 3)) if shape and shape[dimension] else 1
        edges = [shape[dimension] * part // parts for part in range(parts + 1)] if shape else [0, 0]
        for first, last in pairwise(edges):
            start, size = [0] * len(shape), list(shape)
            if shape:
                start[dimension], size[dimension] = first, last - first
            box = Box(name=name, start=tuple(start), shape=tuple(size))
            for rank in draw(st.sets(st.integers(0, ranks - 1), min_size=1)):
                held[rank].append(box)
    return tensors, held


@given(divided())
def test_every_element_arrives_exactly_once(case: tuple[dict[str, torch.Tensor], dict[int, list[Box]]]) -> None:
    tensors, held = case
    layout = plan_layout(specs_of(tensors), held)
    assume(layout.parcels)
    assert WireLayout.from_json(layout.to_json()) == layout
    for parcel in layout.parcels:
        assert all(each.offset % ALIGNMENT == 0 for each in parcel.slices)
        assert all(one.offset + one.num_bytes <= other.offset for one, other in pairwise(parcel.slices))
        assert all(any(each.box.row_within(box) is not None for box in held[parcel.sender]) for each in parcel.slices)
    sent = sum(each.num_bytes for parcel in layout.parcels for each in parcel.slices)
    assert sent == layout.num_bytes == sum(size_of(each) for each in layout.specs)
    received = carried(layout, tensors, held)
    assert all(torch.equal(received[name], tensor) for name, tensor in tensors.items())
    assert list(received) == list(tensors)


@pytest.mark.parametrize("replicas", [1, 2, 3, 8])
def test_replicas_send_equal_shares(replicas: int) -> None:
    specs = [spec("embedding", 1000, 64), *(spec(f"{layer}.fc", 256, 64) for layer in range(6)), spec("norm", 64)]
    layout = plan_layout(specs, {rank: [Box.whole(each) for each in specs] for rank in range(replicas)})
    fair = sum(size_of(each) for each in specs) / replicas
    assert len(layout.parcels) == replicas
    assert all(abs(parcel.num_bytes - fair) <= 64 * 4 * 2 for parcel in layout.parcels), "within two rows"


def test_what_many_hold_evens_out_what_few_hold() -> None:
    """Rank 0 alone has a large matrix; what all three share is sent by the others."""
    alone, shared = spec("alone", 100, 16), spec("shared", 100, 16)
    layout = plan_layout(
        [alone, shared], {0: [Box.whole(alone), Box.whole(shared)], 1: [Box.whole(shared)], 2: [Box.whole(shared)]}
    )
    senders = {parcel.sender: {each.box.name for each in parcel.slices} for parcel in layout.parcels}
    assert senders == {0: {"alone"}, 1: {"shared"}, 2: {"shared"}}
    assert len({parcel.num_bytes for parcel in layout.parcels if parcel.sender}) == 1


@given(st.lists(st.tuples(st.integers(1, 1000), st.frozensets(st.integers(0, 5), min_size=1)), min_size=1, max_size=12))
def test_no_rank_sends_what_a_less_loaded_holder_could(parameters: list[tuple[int, frozenset[int]]]) -> None:
    """Then no plan has more equal loads. A few rows are forgiven: cuts are between rows."""
    holders = {spec(f"p{number}", rows): ranks for number, (rows, ranks) in enumerate(parameters)}
    held = {rank: [Box.whole(each) for each, ranks in holders.items() if rank in ranks] for rank in range(6)}
    sent: dict[int, Counter[str]] = {rank: Counter() for rank in held}
    for parcel in plan_layout([*holders], held).parcels:
        for each in parcel.slices:
            sent[parcel.sender][each.box.name] += each.box.rows
    for parameter, ranks in holders.items():
        least = min(sent[rank].total() for rank in ranks)
        for rank in ranks:
            assert sent[rank][parameter.name] <= 12 or sent[rank].total() <= least + 12


def test_a_dtype_that_cannot_travel_is_named() -> None:
    phase = spec("phase", 2, dtype="complex64")
    with pytest.raises(WireError, match="phase has dtype complex64"):
        plan_layout([phase], {0: [Box.whole(phase)]})


@pytest.mark.parametrize(
    "other",
    [
        [spec("a", 2), spec("b", 3)],
        [spec("a", 2, 1), spec("b", 2)],
        [spec("a", 2, dtype="float16"), spec("b", 2)],
        [spec("b", 2), spec("a", 2)],
        [spec("a", 2)],
        [spec("a", 2), spec("b", 2), spec("c", 2)],
    ],
)
def test_models_that_differ_are_told_apart_and_the_difference_named(other: list[ParameterSpec]) -> None:
    ours = [spec("a", 2), spec("b", 2)]
    assert describe_mismatch(other, ours)
    assert describe_mismatch(ours, ours) == ""


def test_the_digest_of_tensors_sees_every_byte_name_shape_and_dtype_and_no_order() -> None:
    tensors = {"a": torch.arange(6.0), "b": torch.zeros(2, 2)}
    digest = digest_of(tensors)
    assert digest == digest_of(dict(reversed(tensors.items())))
    assert digest == digest_of({"a": torch.arange(6.0).reshape(2, 3).t().contiguous().t().reshape(6), "b": tensors["b"]})
    others = [
        {**tensors, "a": torch.arange(6.0) + math.ulp(1.0) * 1e9},
        {**tensors, "b": torch.zeros(4)},
        {**tensors, "b": torch.zeros(2, 2, dtype=torch.int32)},
        {"a": tensors["b"], "b": tensors["a"]},
        {"a": tensors["a"]},
    ]
    assert digest not in {digest_of(other) for other in others}


def test_a_version_s_digest_sees_the_layout_and_every_chunk_in_its_place() -> None:
    found = {
        version_digest(layout, chunks)
        for layout in ("one", "other")
        for chunks in ([["a", "b"], ["c"]], [["a"], ["b", "c"]], [["b", "a"], ["c"]], [["a", "b"], ["d"]])
    }
    assert len(found) == 8
