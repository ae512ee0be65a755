"""The plan of a push: every byte once, the same at both ends, large tensors alone."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.errors import WireError
from async_rl.parameter_spec import ParameterSpec
from async_rl.transport.digest import digest_of, specs_of
from async_rl.transport.plan import (
    ALIGNMENT,
    ALONE_BYTES,
    SLICE_BYTES,
    Transfer,
    manifest_difference,
    manifest_digest,
    plan_transfers,
    size_of,
)
from async_rl.transport.staging import Staging

KIB = 1 << 10


def spec(name: str, *shape: int, dtype: str = "float32") -> ParameterSpec:
    return ParameterSpec(name=name, shape=shape, dtype=dtype)


def names(transfers: tuple[Transfer, ...]) -> list[list[str]]:
    return [[piece.name for piece in transfer.pieces] for transfer in transfers]


shapes = st.lists(st.integers(0, 600), max_size=3).map(tuple)
dtypes = st.sampled_from(["float32", "bfloat16", "int64", "bool", "float16"])
tables = st.lists(st.tuples(shapes, dtypes), max_size=30).map(
    lambda rows: [ParameterSpec(name=f"p{i}", shape=shape, dtype=dtype) for i, (shape, dtype) in enumerate(rows)]
)


@settings(deadline=None, derandomize=True)
@given(specs=tables, bucket_bytes=st.integers(1, 4 << 20))
def test_every_byte_travels_exactly_once(specs: list[ParameterSpec], bucket_bytes: int) -> None:
    transfers = plan_transfers(specs, bucket_bytes)
    assert transfers == plan_transfers(list(specs), bucket_bytes)
    for parameter in specs:
        pieces = sorted(
            (piece.start, piece.stop) for transfer in transfers for piece in transfer.pieces if piece.name == parameter.name
        )
        assert sum(stop - start for start, stop in pieces) == size_of(parameter)
        assert all(one[1] == other[0] for one, other in pairwise(pieces))
        assert not pieces or pieces[0][0] == 0
    for transfer in transfers:
        assert all(piece.offset % ALIGNMENT == 0 for piece in transfer.pieces)
        assert all(one.offset + one.num_bytes <= other.offset for one, other in pairwise(transfer.pieces))
        if transfer.is_packed:
            assert transfer.num_bytes <= bucket_bytes
            assert all(piece.num_bytes < ALONE_BYTES for piece in transfer.pieces)


def test_only_small_tensors_share_a_transfer() -> None:
    specs = [spec("a", 10), spec("large", 512, KIB), spec("b", 10), spec("c", 10)]
    assert names(plan_transfers(specs, 32 << 20)) == [["large"], ["a", "b", "c"]]


def test_a_full_bucket_leaves_and_another_begins() -> None:
    specs = [spec(name, 16 * KIB) for name in "abc"]
    assert names(plan_transfers(specs, 128 * KIB)) == [["a", "b"], ["c"]]


def test_a_tensor_beyond_the_longest_transfer_goes_in_slices() -> None:
    transfers = plan_transfers([spec("huge", SLICE_BYTES + 4, dtype="int8")], 32 << 20)
    assert [(piece.start, piece.stop) for transfer in transfers for piece in transfer.pieces] == [
        (0, SLICE_BYTES),
        (SLICE_BYTES, SLICE_BYTES + 4),
    ]


def test_empty_tensors_need_no_transfer() -> None:
    assert plan_transfers([spec("nothing", 0, 8)], 1 << 20) == ()


def test_a_dtype_that_cannot_travel_is_named() -> None:
    with pytest.raises(WireError, match="phase has dtype complex64"):
        plan_transfers([spec("phase", 2, dtype="complex64")], 1 << 20)


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
def test_manifests_that_differ_are_told_apart_and_the_difference_named(other: list[ParameterSpec]) -> None:
    ours = [spec("a", 2), spec("b", 2)]
    assert manifest_digest(ours) != manifest_digest(other)
    assert manifest_difference(other, ours)
    assert manifest_difference(ours, ours) == ""


def test_the_digest_sees_every_byte_name_shape_and_dtype_and_no_order() -> None:
    tensors = {"a": torch.arange(6.0), "b": torch.ones(2, dtype=torch.int64)}
    digest = digest_of(tensors)
    assert digest == digest_of(dict(reversed(tensors.items())))
    assert digest == digest_of({"a": torch.arange(6.0).reshape(2, 3).t().contiguous().t().reshape(6), "b": tensors["b"]})
    flipped = tensors["a"].clone()
    flipped.view(torch.uint8)[23] ^= 1
    others = [
        tensors | {"a": flipped},
        tensors | {"a": tensors["a"].reshape(2, 3)},
        tensors | {"a": tensors["a"].view(torch.int32)},
        {"c": tensors["a"], "b": tensors["b"]},
    ]
    assert digest not in {digest_of(other) for other in others}


@settings(deadline=None, derandomize=True, max_examples=30)
@given(specs=tables, bucket_bytes=st.integers(1, 2 << 20))
def test_staging_buffers_have_the_shapes_asked_for_and_share_no_byte(specs: list[ParameterSpec], bucket_bytes: int) -> None:
    specs = [parameter for parameter in specs if size_of(parameter) < 4 << 20]
    staging = Staging(specs, plan_transfers(specs, bucket_bytes), torch.device("cpu"))
    assert list(specs_of(staging.tensors)) == specs
    for number, tensor in enumerate(staging.tensors.values()):
        tensor.fill_(number % 2)
    assert all(bool((tensor == number % 2).all()) for number, tensor in enumerate(staging.tensors.values()))
