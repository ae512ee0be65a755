"""Plans which learner rank sends which bytes. Pure: computed once from the boxes that each rank holds, same for every push.

    what ranks hold: boxes      who sends them: slices              what travels
    rank 0  fc1[0:8, :]    ──▶  rank 0  fc1[0:4, :], norm      ──▶  parcel of rank 0, flat
    rank 1  fc1[0:8, :]         rank 1  fc1[4:8, :]                 parcel of rank 1

A box of a parameter may lie on several ranks (replicas of the model, or parameters that tensor parallelism does not split):
each of them sends a share. Receivers assemble full parameters, so they do not depend on the learner's parallelism. No torch.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import xxhash
from pydantic import TypeAdapter

from async_rl.errors import WireError
from async_rl.models.parameter_spec import ParameterSpec

CHUNK_BYTES = 4 << 20
"""Bytes covered by one digest: few enough to be hashed while in the cache, enough to keep the number of digests small."""

ALIGNMENT = 64
"""A slice starts at a multiple of this many bytes, so that it can be viewed in place as a tensor of any dtype."""

_ROUNDS = 20
"""Iterations of load balancing. In real models hardly anything moves after the first."""


class WireDtype(NamedTuple):
    num_bytes: int
    in_files: str
    """Its name in safetensors files."""


WIRE_DTYPES = {
    "bool": WireDtype(1, "BOOL"),
    "uint8": WireDtype(1, "U8"),
    "int8": WireDtype(1, "I8"),
    "float8_e4m3fn": WireDtype(1, "F8_E4M3"),
    "float8_e5m2": WireDtype(1, "F8_E5M2"),
    "int16": WireDtype(2, "I16"),
    "float16": WireDtype(2, "F16"),
    "bfloat16": WireDtype(2, "BF16"),
    "int32": WireDtype(4, "I32"),
    "float32": WireDtype(4, "F32"),
    "int64": WireDtype(8, "I64"),
    "float64": WireDtype(8, "F64"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """The elements [start, start + shape) of a parameter, in each dimension."""

    name: str
    start: tuple[int, ...]
    shape: tuple[int, ...]

    @staticmethod
    def whole(spec: ParameterSpec) -> Box:
        return Box(name=spec.name, start=(0,) * len(spec.shape), shape=spec.shape)

    @property
    def rows(self) -> int:
        return self.shape[0] if self.shape else 1

    def cut(self, first: int, last: int) -> Box:
        """The box of rows [first, last)."""
        if not self.shape:
            return self
        return replace(self, start=(self.start[0] + first, *self.start[1:]), shape=(last - first, *self.shape[1:]))

    def row_within(self, other: Box) -> int | None:
        """The row of `other` at which this box begins; None when it is not inside `other`."""
        if (self.name, self.start[1:], self.shape[1:]) != (other.name, other.start[1:], other.shape[1:]):
            return None
        row = self.start[0] - other.start[0] if self.shape else 0
        return row if 0 <= row <= other.rows - self.rows else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """A box in a parcel: contiguous, beginning at byte `offset`."""

    box: Box
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """Everything that one rank sends of a version."""

    sender: int
    slices: tuple[Slice, ...]
    num_bytes: int

    @property
    def num_chunks(self) -> int:
        return math.ceil(self.num_bytes / CHUNK_BYTES)


@dataclass(frozen=True, kw_only=True)
class WireLayout:
    """The parcels of a version. Every element of every parameter is in exactly one slice."""

    specs: tuple[ParameterSpec, ...]
    parcels: tuple[Parcel, ...]

    @cached_property
    def num_bytes(self) -> int:
        return sum(size_of(spec) for spec in self.specs)

    @cached_property
    def places(self) -> Mapping[str, Sequence[tuple[int, Slice]]]:
        """For each parameter its slices, each with the number of its parcel."""
        places: dict[str, list[tuple[int, Slice]]] = {spec.name: [] for spec in self.specs}
        for number, parcel in enumerate(self.parcels):
            for each in parcel.slices:
                places[each.box.name].append((number, each))
        return places

    @cached_property
    def spec_of(self) -> Mapping[str, ParameterSpec]:
        return {spec.name: spec for spec in self.specs}

    @cached_property
    def sizes(self) -> Mapping[str, tuple[int, ...]]:
        return {spec.name: spec.shape for spec in self.specs}

    @cached_property
    def digest(self) -> str:
        return xxhash.xxh3_128_hexdigest(self.to_json())

    def to_json(self) -> bytes:
        return _LAYOUT.dump_json(self)

    @staticmethod
    def from_json(text: bytes) -> WireLayout:
        return _LAYOUT.validate_json(text)


_LAYOUT = TypeAdapter(WireLayout)


def wire_specs(specs: Sequence[ParameterSpec], dtype: str) -> tuple[ParameterSpec, ...]:
    """The parameters as they are sent. `dtype` is `wire.dtype`: "model" keeps theirs, anything else replaces it."""
    return tuple(specs) if dtype == "model" else tuple(replace(spec, dtype=dtype) for spec in specs)


def item_bytes(spec: ParameterSpec) -> int:
    if spec.dtype not in WIRE_DTYPES:
        raise WireError(f"{spec.name} has dtype {spec.dtype}, which the weight wire does not carry")
    return WIRE_DTYPES[spec.dtype].num_bytes


def size_of(spec: ParameterSpec) -> int:
    return math.prod(spec.shape) * item_bytes(spec)


def plan_layout(specs: Sequence[ParameterSpec], held: Mapping[int, Sequence[Box]]) -> WireLayout:
    """Divide the parameters among the ranks that hold them, with loads as equal as possible. `held`: the boxes on each rank."""
    holders: dict[Box, list[int]] = defaultdict(list)
    for rank in sorted(held):
        for box in held[rank]:
            holders[box].append(rank)
    by_holders: dict[tuple[int, ...], list[Box]] = defaultdict(list)
    order = {spec.name: number for number, spec in enumerate(specs)}
    for box in sorted(holders, key=lambda box: (order[box.name], box.start)):
        by_holders[tuple(holders[box])].append(box)
    sizes = {spec.name: item_bytes(spec) for spec in specs}
    quotas = _quotas({ranks: _bytes(boxes, sizes) for ranks, boxes in by_holders.items()})
    sent: dict[int, list[Box]] = {rank: [] for rank in held}
    for ranks, boxes in by_holders.items():
        for rank, share in _shares(boxes, quotas[ranks], sizes):
            sent[rank].append(share)
    parcels = (_parcel(rank, boxes, sizes) for rank, boxes in sorted(sent.items()))
    return WireLayout(specs=tuple(specs), parcels=tuple(parcel for parcel in parcels if parcel.slices))


def _bytes(boxes: Sequence[Box], sizes: Mapping[str, int]) -> int:
    return sum(math.prod(box.shape) * sizes[box.name] for box in boxes)


def _quotas(totals: Mapping[tuple[int, ...], int]) -> dict[tuple[int, ...], dict[int, int]]:
    """How many bytes each rank sends of the boxes that it shares with others.

    Each set of sharing ranks levels its loads in turn; this is repeated, because other sets change the same ranks' loads.
    """
    quotas = {ranks: dict.fromkeys(ranks, 0) for ranks in sorted(totals, key=len)}
    loads: Counter[int] = Counter()
    for _ in range(_ROUNDS):
        for ranks, last in quotas.items():
            loads.subtract(last)
            quotas[ranks] = _level({rank: loads[rank] for rank in ranks}, totals[ranks])
            loads.update(quotas[ranks])
    return quotas


def _level(loads: Mapping[int, int], total: int) -> dict[int, int]:
    """Distribute `total` so that the least loaded ranks end with equal loads."""
    level, filled = 0, 0
    rising = sorted(loads.values())
    for count, load in enumerate(rising, start=1):
        filled += load
        level = (total + filled) // count
        if count == len(rising) or level <= rising[count]:
            break
    return {rank: max(0, level - load) for rank, load in loads.items()}


def _shares(boxes: Sequence[Box], quotas: Mapping[int, int], sizes: Mapping[str, int]) -> Iterator[tuple[int, Box]]:
    """Assign the boxes to ranks in order, cutting a box between rows where a quota is reached."""
    ends = dict(zip(quotas, accumulate(quotas.values()), strict=True))
    *_, last_rank = quotas
    dealt = 0
    for box in boxes:
        row_bytes = _bytes([box], sizes) // max(1, box.rows)
        first = 0
        while first < box.rows and row_bytes:
            rank = next((rank for rank, end in ends.items() if end > dealt), last_rank)
            rows = max(1, round((ends[rank] - dealt) / row_bytes)) if rank != last_rank else box.rows
            last = min(box.rows, first + rows)
            yield rank, box.cut(first, last)
            dealt += (last - first) * row_bytes
            first = last


def _parcel(sender: int, boxes: Sequence[Box], sizes: Mapping[str, int]) -> Parcel:
    slices: list[Slice] = []
    offset = 0
    for box in boxes:
        num_bytes = _bytes([box], sizes)
        slices.append(Slice(box=box, offset=offset, num_bytes=num_bytes))
        offset += math.ceil(num_bytes / ALIGNMENT) * ALIGNMENT
    return Parcel(sender=sender, slices=tuple(slices), num_bytes=offset)


def describe_mismatch(sent: Sequence[ParameterSpec], held: Sequence[ParameterSpec]) -> str:
    """One sentence on the first difference between the learner's parameters and this model's; empty when they are equal."""
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
