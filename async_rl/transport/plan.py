"""Which bytes travel together. Pure: both ends compute the same plan from the same parameter table. No torch.

A large tensor travels alone, straight from its own memory into its own memory; only small ones share a transfer, where
one round trip for many is worth a copy. A very large tensor travels in slices, so that no transfer outlasts its deadline.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import xxhash

from async_rl.errors import WireError
from async_rl.parameter_spec import ParameterSpec

ALONE_BYTES = 1 << 20
"""From this size on a broadcast runs at the wire's speed, and copying a tensor into a bucket costs more than a round trip."""

SLICE_BYTES = 256 << 20
"""The most that one transfer carries: 10 s of operation timeout then allow a wire as slow as 26 MB/s."""

ALIGNMENT = 64
"""A piece starts at a multiple of this, so that it can be viewed as a tensor of any dtype where it lies."""

_ITEM_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "float32": 4,
    "int64": 8,
    "float64": 8,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Bytes [start, stop) of a parameter, lying at `offset` of their transfer."""

    name: str
    start: int
    stop: int
    offset: int

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One broadcast."""

    pieces: tuple[Piece, ...]

    @property
    def is_packed(self) -> bool:
        """Whether several parameters share it; a single piece needs no copy."""
        return len(self.pieces) > 1

    @property
    def num_bytes(self) -> int:
        return self.pieces[-1].offset + self.pieces[-1].num_bytes


def size_of(spec: ParameterSpec) -> int:
    if spec.dtype not in _ITEM_BYTES:
        raise WireError(f"{spec.name} has dtype {spec.dtype}, which the weight wire does not carry")
    return math.prod(spec.shape) * _ITEM_BYTES[spec.dtype]


def plan_transfers(specs: Sequence[ParameterSpec], bucket_bytes: int) -> tuple[Transfer, ...]:
    """Every byte of every parameter exactly once, in an order that depends on the specs and `bucket_bytes` alone."""
    return tuple(_transfers(specs, bucket_bytes))


def _transfers(specs: Sequence[ParameterSpec], bucket_bytes: int) -> Iterator[Transfer]:
    bucket: list[Piece] = []
    filled = 0
    for spec in specs:
        size = size_of(spec)
        if size >= min(ALONE_BYTES, bucket_bytes):
            yield from _slices(spec.name, size)
        elif size:
            if filled + size > bucket_bytes:
                yield Transfer(pieces=tuple(bucket))
                bucket, filled = [], 0
            bucket.append(Piece(name=spec.name, start=0, stop=size, offset=filled))
            filled += math.ceil(size / ALIGNMENT) * ALIGNMENT
    if bucket:
        yield Transfer(pieces=tuple(bucket))


def _slices(name: str, size: int) -> Iterator[Transfer]:
    for start in range(0, size, SLICE_BYTES):
        yield Transfer(pieces=(Piece(name=name, start=start, stop=min(start + SLICE_BYTES, size), offset=0),))


def manifest_digest(specs: Sequence[ParameterSpec]) -> str:
    """Equal exactly when names, shapes, dtypes and their order are."""
    return xxhash.xxh3_128_hexdigest("\n".join(_line(spec) for spec in specs).encode())


def manifest_difference(sent: Sequence[ParameterSpec], held: Sequence[ParameterSpec]) -> str:
    """The first way in which two parameter tables differ, for a person; empty when they are equal."""
    ours = {spec.name: spec for spec in held}
    for spec in sent:
        if spec.name not in ours:
            return f"the learner sends {_line(spec)}, which this model does not have"
        if spec != ours[spec.name]:
            return f"the learner sends {_line(spec)}, this model has {_line(ours[spec.name])}"
    theirs = {spec.name for spec in sent}
    for spec in held:
        if spec.name not in theirs:
            return f"this model has {_line(spec)}, which the learner does not send"
    return "" if list(sent) == list(held) else "the learner sends the same parameters in another order"


def _line(spec: ParameterSpec) -> str:
    return f"{spec.name} {spec.dtype}{list(spec.shape)}"
