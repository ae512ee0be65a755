"""Compact lossless deltas between two images of weights, a few bits per change, for a receiver that holds the older image.

    old, new ──find──▶ which differ ──describe──▶ gaps, steps ──pack──▶ bytes
    bytes ──unpack──▶ gaps, steps ──locate (reads old)──▶ places ──move──▶ new, where old was

Both ends know the exponents of the old weights, and these largely determine which weights an update changes: rounding to a
short float hides steps that are small beside the weight. A change is encoded as a gap (the number of unchanged weights of the
same exponent before it) and a step (by how many representable numbers the weight moved).

A delta covers one chunk of elements of one dtype and does not depend on other chunks, so threads can work in parallel; nearly
all of the work is done without the GIL. A delta does not name the image that it was made from, and applied to another one it
gives wrong weights: the sender says which version it belongs to, and the receiver verifies the digest of the result.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt

from async_rl.errors import WireError
from async_rl.transport.delta.compact_format import Delta

Image = npt.NDArray[np.uint8]
"""Elements as bytes."""

CHUNK_BYTES = 4 << 20
"""Best size for one delta: enough to adapt the coder's probabilities, small enough to stay in a cache."""

_BLOCK = 64
_SAMPLES = 1024
_RARE = 128
"""The lowest exponents are merged into one while they make up at most one in this many changes: fewer to search for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    code: int
    bits: int
    mantissa: int

    @property
    def half(self) -> int:
        """The first bit pattern with a sign."""
        return 1 << (self.bits - 1)

    def elements(self, image: Image) -> npt.NDArray[Any]:
        return image.view(np.uint16 if self.bits == 16 else np.uint32)


_KINDS = {
    "bfloat16": _Kind(code=1, bits=16, mantissa=7),
    "float16": _Kind(code=2, bits=16, mantissa=10),
    "float32": _Kind(code=3, bits=32, mantissa=23),
}
_BY_CODE = {kind.code: kind for kind in _KINDS.values()}


def is_available() -> bool:
    """Whether this process can make and apply compact deltas: they need numba, of the extra `delta`."""
    return find_spec("numba") is not None


def warm_up(dtype: str = "bfloat16") -> None:
    """Compile the kernels, or load them from disk, before the first delta. Takes seconds: call it on a thread."""
    old = np.arange(1 << 14, dtype=np.uint8)
    new = old.copy()
    new[::1024] ^= 1
    made = encode(old, new, dtype)
    assert made is not None
    apply(made, old)


def encode(old: Image, new: Image, dtype: str, *, most_changed: float = 0.25) -> bytes | None:
    """The delta from `old` to `new`. None for other dtypes, if more elements changed, or if it is not smaller."""
    kind = _KINDS.get(dtype)
    if kind is None or old.size == 0:
        return None
    before, after = kind.elements(old), kind.elements(new)
    stride = max(1, before.size // _SAMPLES)
    if np.mean(before[::stride] != after[::stride]) > 2 * most_changed:
        return None
    delta = _changes(kind, before, after, int(most_changed * before.size))
    made = delta.to_bytes() if delta is not None else None
    return made if made is not None and len(made) < old.size else None


def apply(made: bytes, image: Image) -> int:
    """Turn the old image into the new one, in place; returns the number of elements that changed.

    Raises WireError, and changes nothing, when the bytes are damaged, no delta, or a delta for an image of another size.
    """
    delta = Delta.from_bytes(made)
    kind = _BY_CODE.get(delta.dtype_code)
    if kind is None or image.size * 8 != delta.num_elements * kind.bits:
        raise WireError(f"a delta for {delta.num_elements} elements arrived for an image of {image.size} bytes")
    if delta.num_changes == 0:
        return 0
    from async_rl.transport.delta.integer_coder import decode_integers
    from async_rl.transport.delta.scan import locate, move

    lists = np.empty((2, delta.num_changes), np.int64)
    if not decode_integers(delta.decisions, delta.rests, lists):
        raise WireError("a delta's streams do not match its header")
    gaps, sizes = lists
    steps = np.where(np.unpackbits(delta.signs, count=gaps.size), -1 - sizes, 1 + sizes)
    elements, places = kind.elements(image), np.empty_like(gaps)
    is_found = locate(_whole_blocks(elements), kind.mantissa, delta.counts, gaps, places)
    if not is_found or not move(elements, kind.half, places, steps):
        raise WireError("a delta changes elements that the image does not have: it was made from another image")
    return gaps.size


def _changes(kind: _Kind, before: npt.NDArray[Any], after: npt.NDArray[Any], most: int) -> Delta | None:
    """The changes as a Delta; None if there are more than `most`, or if they would take more bytes than the image."""
    from async_rl.transport.delta.integer_coder import encode_integers
    from async_rl.transport.delta.scan import describe, find

    old, new = _whole_blocks(before), _whole_blocks(after)
    words, firsts = np.empty(old.size // _BLOCK, np.uint64), np.empty(old.size // _BLOCK, np.int64)
    counts, in_order = np.zeros(256, np.int64), np.empty(most + _BLOCK, np.int64)
    changed = find(old, new, kind.mantissa, kind.half, words, firsts, in_order, counts)
    if not 0 <= changed <= most:
        return None
    lists = np.empty((2, changed), np.int64)
    gaps, steps = lists
    decisions = rests = signs = np.empty(0, np.uint8)
    if changed > 0:
        _merge(counts, changed // _RARE)
        describe(old, kind.mantissa, words, firsts, in_order, counts, gaps, steps)
        signs = np.packbits(steps < 0)
        np.abs(steps, out=steps)
        steps -= 1
        decisions, rests = np.empty(old.nbytes, np.uint8), np.empty(old.nbytes, np.uint8)
        num_decisions, num_rests = encode_integers(lists, decisions, rests)
        if num_decisions < 0:
            return None
        decisions, rests = decisions[:num_decisions], rests[:num_rests]
    return Delta(
        dtype_code=kind.code, num_elements=before.size, counts=counts, decisions=decisions, rests=rests, signs=signs
    )  # fmt: skip


def _merge(counts: npt.NDArray[np.int64], most: int) -> None:
    """Merge the lowest exponents into one as long as at most `most` changes have them."""
    merged = int(np.searchsorted(np.cumsum(counts), most, "right"))
    if merged > 0:
        counts[merged - 1], counts[: merged - 1] = counts[:merged].sum(), 0


def _whole_blocks(elements: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A read-only view padded with zeros to whole blocks. Both ends pad alike, and padding never changes."""
    missing = -elements.size % _BLOCK
    read = np.concatenate([elements, np.zeros(missing, elements.dtype)]) if missing else elements.view()
    read.flags.writeable = False
    return read
