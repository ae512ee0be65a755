"""Encodings of changes of bfloat16 weights: ours, and those that others ship. Each handles one chunk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import zstandard

from async_rl.transport.delta import compact_codec, parallel_codec

Bits = npt.NDArray[np.uint16]

FARTHEST = 0xFFFF
"""A gap of 16 bits; a wider one is bridged by changes to the same value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Codec:
    name: str
    encode: Callable[[Bits, Bits], bytes]
    apply: Callable[[bytes, Bits], Any]
    """Apply in place."""


def _ours(old: Bits, new: Bits) -> bytes:
    made = compact_codec.encode(old.view(np.uint8), new.view(np.uint8), "bfloat16", most_changed=1)
    assert made is not None
    return made


def _parallel(old: Bits, new: Bits) -> bytes:
    made = parallel_codec.encode(_tensor(old), _tensor(new), "bfloat16", most_changed=1)
    assert made is not None
    return made


def _tensor(bits: Bits) -> torch.Tensor:
    return torch.from_numpy(bits.view(np.uint8))


def _gaps_and_xor(old: Bits, new: Bits) -> bytes:
    """The places as 16-bit gaps, then what to xor there, all through zstd at its fastest level."""
    places = np.flatnonzero(old != new)
    gaps = np.diff(places, prepend=-1) - 1
    bridges = gaps // (FARTHEST + 1)
    if bridges.any():
        places = np.sort(np.concatenate([places, *(_bridges(places[at], gaps[at]) for at in np.flatnonzero(bridges))]))
        gaps = np.diff(places, prepend=-1) - 1
    raw = gaps.astype("<u2").tobytes() + (old[places] ^ new[places]).tobytes()
    return zstandard.ZstdCompressor(level=1).compress(raw)


def _bridges(place: int, gap: int) -> npt.NDArray[np.int64]:
    return np.arange(place - gap + FARTHEST, place, FARTHEST + 1)


def _apply_gaps_and_xor(made: bytes, image: Bits) -> None:
    gaps, values = np.split(np.frombuffer(zstandard.ZstdDecompressor().decompress(made), "<u2"), 2)
    places = np.cumsum(gaps.astype(np.int64) + 1) - 1
    image[places] ^= values


def _xor(old: Bits, new: Bits) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress((old ^ new).tobytes())


def _apply_xor(made: bytes, image: Bits) -> None:
    image ^= np.frombuffer(zstandard.ZstdDecompressor().decompress(made), np.uint16)


OURS = Codec(name="ours", encode=_ours, apply=lambda made, image: compact_codec.apply(made, image.view(np.uint8)))
PARALLEL = Codec(name="ours, on GPUs", encode=_parallel, apply=lambda made, image: parallel_codec.apply(made, _tensor(image)))
GAPS = Codec(name="u16 gaps + xor + zstd-1", encode=_gaps_and_xor, apply=_apply_gaps_and_xor)
XOR = Codec(name="xor + zstd-1", encode=_xor, apply=_apply_xor)
