"""Lossless deltas by a few operations on all changes at once: for parcels in a GPU's memory, and where numba is not installed.

    old, new ──compare──▶ places, steps ──▶ rows of bits ──▶ bytes
    bytes ──▶ places, steps (reads old) ──▶ new, where old was

The places ascend and are an Elias-Fano code: the low bits of each as they are, the differences of the others in unary. A step
is by how many representable numbers the weight moved: its sign, and its size less one in unary, or as a number if it is large.
A change costs up to twice as many bits as in compact_codec.py, which knows how often the weights of an exponent change, and
codes one change after the other.

header      format, low bits of a place, how many elements, changes and large sizes; a digest of this and all that follows
large       sizes less one of at least `_LARGE`, 16 bits each
low bits    a row for each of them, then one for the signs, set where the weight became smaller
high bits   in unary
sizes       less one, in unary, large ones as `_LARGE`
"""

from __future__ import annotations

import struct

import torch
from torch import Tensor
from torch.nn import functional

from async_rl.errors import WireError
from async_rl.transport.delta.checksum import DIGEST_BYTES, digest

DTYPES = ("bfloat16", "float16")
"""Those in which an update changes few elements: most steps are smaller than the rounding. In float32 all change."""

PIECE_BYTES = 32 << 20
"""Size of one delta, a first guess: a larger one takes fewer launches, a smaller one less memory."""

_FORMAT = 2
_HEADER = struct.Struct("<BBHIII")
_BODY_AT = _HEADER.size + DIGEST_BYTES
_LARGE = 15
_MOST_LOW_BITS = 8
_SAMPLES = 1024
_WORD = 8
"""Bytes that are compared at once; parcels are whole numbers of them."""
_GATHER = 0x0102040810204080
"""Multiplying eight bytes of 0 or 1, read as one number, by this collects them as bits in its highest byte."""
_HALF = 1 << 15
"""The first bit pattern with a sign."""


def encode(old: Tensor, new: Tensor, dtype: str, *, most_changed: float = 0.25) -> bytes | None:
    """Return the delta between two images, bytes on one device. None: another dtype, a size that is no multiple of 8 bytes,
    more than `most_changed` of the elements changed, or the delta is not smaller.
    """
    if dtype not in DTYPES or len(old) == 0 or len(old) % _WORD:
        return None
    before, after = old.view(torch.int16), new.view(torch.int16)
    stride = max(1, len(before) // _SAMPLES)
    if (before[::stride] != after[::stride]).float().mean().item() > 2 * most_changed:
        return None
    places = _changed(old, new)
    if len(places) > most_changed * len(before):
        return None
    low_bits = min(range(_MOST_LOW_BITS + 1), key=lambda low: low + len(before) / max(1, len(places) << low))
    steps = _ordered(after[places]) - _ordered(before[places])
    large, streams = _streams(places, steps, low_bits, _high_flags(len(before), len(places), low_bits))
    rest = streams.cpu().numpy().tobytes()
    head = _HEADER.pack(_FORMAT, low_bits, 0, len(before), len(places), large)
    made = b"".join([head, digest(head, rest), rest])
    return made if len(made) < len(old) else None


def apply(made: bytes, image: Tensor) -> int:
    """Turn the old image into the new one, in place; returns the number of elements that changed.

    Raises WireError, and changes nothing, when the bytes are damaged, no delta, or a delta for an image of another size.
    """
    low_bits, num_elements, changes, large = _read_header(made)
    if len(image) != 2 * num_elements:
        raise WireError(f"a delta for {num_elements} elements arrived for an image of {len(image)} bytes")
    if changes == 0:
        return 0
    lengths = [2 * large, (low_bits + 1) * _in_bytes(changes), _in_bytes(_high_flags(num_elements, changes, low_bits))]
    streams = torch.frombuffer(bytearray(made), dtype=torch.uint8)[_BODY_AT:].to(image.device)
    if len(streams) < sum(lengths):
        raise WireError("a delta is shorter than its header promises")
    larges, rows, highs, sizes = torch.split(streams, [*lengths, len(streams) - sum(lengths)])
    rows = _flags(rows).view(low_bits + 1, -1)[:, :changes]
    high_ends, size_ends = (_flags(each).nonzero()[:, 0] for each in (highs, sizes))
    if len(high_ends) != changes or len(size_ends) != changes:
        raise WireError("a delta's streams do not match its header")

    places = (high_ends - torch.arange(changes, device=image.device)) << low_bits
    places += (rows[:-1] << _shifts(low_bits, image.device)).sum(dim=0)
    sizes = size_ends.diff(prepend=size_ends.new_tensor([-1]))  # less one, and its end
    are_large = (sizes > _LARGE).nonzero()[:, 0]
    if len(are_large) != large:
        raise WireError("a delta's streams do not match its header")
    sizes[are_large] = (larges.view(torch.int16).long() & 0xFFFF) + 1
    elements = image.view(torch.int16)
    targets = _ordered(elements[places.clamp(max=num_elements - 1)]) + torch.where(rows[-1].bool(), -sizes, sizes)
    is_possible = (places.diff() > 0).all() & (places[-1] < num_elements) & (targets >= -_HALF).all() & (targets < _HALF).all()
    if not is_possible.item():
        raise WireError("a delta changes elements that the image does not have: it was made from another image")
    elements[places] = _ordered(targets).short()
    return changes


def _changed(old: Tensor, new: Tensor) -> Tensor:
    """The places of the elements that differ, in order."""
    before, after = old.view(torch.int64), new.view(torch.int64)
    words = (before != after).nonzero()[:, 0]  # a fourth as many as elements
    per_word = _WORD // 2
    differences = (before[words] ^ after[words]).view(torch.int16).view(-1, per_word)
    places = words.int()[:, None] * per_word + torch.arange(per_word, dtype=torch.int32, device=old.device)
    return places[differences != 0].long()


def _streams(places: Tensor, steps: Tensor, low_bits: int, high_flags: int) -> tuple[int, Tensor]:
    """The number of large sizes, and all streams one after the other."""
    if len(places) == 0:
        return 0, places.byte()
    sizes = steps.abs() - 1
    large = sizes[sizes >= _LARGE]
    rows = torch.cat([places.byte() >> _shifts(low_bits, places.device) & 1, (steps < 0).byte()[None]])
    highs = (places >> low_bits).diff(prepend=places.new_zeros(1))
    sizes.clamp_(max=_LARGE)
    unary = [_in_unary(highs, high_flags), _in_unary(sizes, int(sizes.sum()) + len(sizes))]
    return len(large), torch.cat([large.short().view(torch.uint8), _packed(rows).flatten(), *unary])


def _high_flags(num_elements: int, changes: int, low_bits: int) -> int:
    """How many the high bits take at most; so many are sent."""
    return changes + (num_elements - 1 >> low_bits)


def _in_unary(numbers: Tensor, length: int) -> Tensor:
    """Encode each number n as n zeros and a one; `length` flags in all."""
    flags = torch.zeros(length, dtype=torch.uint8, device=numbers.device)
    flags[(numbers + 1).cumsum(0) - 1] = 1
    return _packed(flags)


def _packed(flags: Tensor) -> Tensor:
    """Eight flags in a byte, along the last dimension, the first in its lowest bit."""
    whole = functional.pad(flags, (0, -flags.shape[-1] % 8))
    return ((whole.view(torch.int64) * _GATHER) >> 56).byte()


def _flags(packed: Tensor) -> Tensor:
    """Undo `_packed` for a single row."""
    return (packed[:, None] >> _shifts(8, packed.device).T & 1).flatten()


def _shifts(bits: int, device: torch.device) -> Tensor:
    """Return a column of 0 to bits - 1, to shift by."""
    return torch.arange(bits, dtype=torch.uint8, device=device)[:, None]


def _in_bytes(bits: int) -> int:
    return -(-bits // 8)


def _ordered(bits: Tensor) -> Tensor:
    """Map the bits of floats to numbers in the same order, or back: neighbours differ by 1. -0 comes right before +0."""
    numbers = bits.int()
    return torch.where(numbers < 0, -_HALF - 1 - numbers, numbers)


def _read_header(made: bytes) -> tuple[int, int, int, int]:
    """Low bits, elements, changes, large sizes. Raises WireError unless the digest agrees and they are possible."""
    if len(made) < _BODY_AT:
        raise WireError(f"a delta of {len(made)} bytes is too short")
    found, low_bits, _, num_elements, changes, large = _HEADER.unpack_from(made)
    if found != _FORMAT:
        raise WireError(f"a delta of format {found} arrived, and this process reads format {_FORMAT} here")
    if digest(made[: _HEADER.size], memoryview(made)[_BODY_AT:]) != made[_HEADER.size : _BODY_AT]:
        raise WireError("a delta arrived damaged")
    if low_bits > _MOST_LOW_BITS or not large <= changes <= num_elements:
        raise WireError("a delta's counts are impossible")
    return low_bits, num_elements, changes, large
