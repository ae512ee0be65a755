"""Images of weights before and after updates, for tests of both encodings of deltas."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from async_rl.errors import WireError

HEADER = struct.Struct("<BBHIII")
"""The header of either encoding."""
BODY = HEADER.size + 8

WIDTHS = {"bfloat16": np.uint16, "float16": np.uint16, "float32": np.uint32}
MANTISSA = {"bfloat16": 7, "float16": 10, "float32": 23}
Bits = npt.NDArray[Any]

relaxed = settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow], print_blob=True)


def specials(dtype: str) -> list[int]:
    """Zeros, the smallest and largest denormals, infinities and NaNs, with either sign; and their neighbours."""
    sign, mantissa = 1 << (8 * np.dtype(WIDTHS[dtype]).itemsize - 1), 1 << MANTISSA[dtype]
    infinity = sign - mantissa
    return [each | signed for each in (0, 1, mantissa - 1, mantissa, infinity - 1, infinity, sign - 1) for signed in (0, sign)]


def weights(rng: np.random.Generator, size: int, dtype: str) -> Bits:
    """Normal numbers as bits; bfloat16 by truncation, since any bits will do."""
    values = rng.normal(0, 0.02, size).astype(np.float16 if dtype == "float16" else np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16) if dtype == "bfloat16" else values.view(WIDTHS[dtype])


def any_bits(rng: np.random.Generator, size: int, dtype: str) -> Bits:
    return rng.integers(0, np.iinfo(WIDTHS[dtype]).max, size, WIDTHS[dtype], endpoint=True)


@st.composite
def updates(draw: st.DrawFn) -> tuple[Bits, Bits, str]:
    """Two images: weights or any bits, of which few to all were nudged, replaced, or made special."""
    dtype = draw(st.sampled_from(sorted(WIDTHS)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    size = draw(st.one_of(st.integers(0, 200), st.integers(200, 20_000)))
    old = draw(st.sampled_from([weights, any_bits]))(rng, size, dtype)
    if size and draw(st.booleans()):
        old[rng.integers(0, size, size // 4)] = rng.choice(np.array(specials(dtype), old.dtype), size // 4)
    is_changed = rng.random(size) < draw(st.sampled_from([0, 0.001, 0.01, 0.1, 0.5, 1]))
    nudged = old + rng.choice(np.array([1, np.iinfo(old.dtype).max, 3], old.dtype), size)
    special = rng.choice(np.array(specials(dtype), old.dtype), size)
    new = np.where(is_changed, draw(st.sampled_from([nudged, special, any_bits(rng, size, dtype)])), old)
    return old, new, dtype


def as_bytes(elements: Bits) -> npt.NDArray[np.uint8]:
    return elements.view(np.uint8)


def signed(head: bytes, rest: bytes) -> bytes:
    """A forged delta in the right format, with a valid digest."""
    return head + struct.pack("<Q", xxhash.xxh3_64_intdigest(head + rest)) + rest


def with_field(made: bytes, field: int, value: int) -> bytes:
    """The delta with another number in its header, and a valid digest."""
    fields = list(HEADER.unpack_from(made))
    fields[field] = value
    return signed(HEADER.pack(*fields), made[BODY:])


def damaged(made: bytes) -> Iterator[bytes]:
    """The delta cut off everywhere, with a byte too many, and with one of its bits flipped."""
    yield from (made[:length] for length in range(len(made)))
    yield made + b"\0"
    for bit in np.random.default_rng(4).integers(0, 8 * len(made), 500):
        flipped = bytearray(made)
        flipped[bit // 8] ^= 1 << (bit % 8)
        yield bytes(flipped)


def is_refused(apply: Callable[[bytes, Any], object], made: bytes, old: npt.NDArray[np.uint8]) -> bool:
    """Whether applying it to the old image raises WireError, and leaves the image as it was."""
    image = old.copy()
    try:
        apply(made, image)
    except WireError:
        return np.array_equal(image, old)
    return False
