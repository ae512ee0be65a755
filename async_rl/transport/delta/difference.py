"""A parcel as its difference to one that the receivers hold: made, sent and applied piece by piece, all at the same time.

    sender      pieces ──encode, on threads──▶ batch n ──┐ sizes, bytes
    receivers                                            └──▶ batch n ──apply in place, on threads──▶ verified

A piece that its difference would not make smaller travels whole. Whether differences are worth their computing is decided for
every push, from a sample of the pieces and from the speed at which the wire carried the last whole parcel.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import cpu_count

import numpy as np
import torch

from async_rl.errors import WireError
from async_rl.transport.delta import codec
from async_rl.transport.plan import Parcel, WireLayout
from async_rl.transport.wire.process_group import Link

_BATCH = 8
"""Pieces that travel together: enough that a round trip does not count, few enough that receivers begin early."""

_SAMPLES = 3
_MAX_THREADS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaPiece:
    """Bytes [start, stop) of a parcel, all of one dtype."""

    start: int
    stop: int
    dtype: str


def pieces(layout: WireLayout, parcel: Parcel) -> tuple[DeltaPiece, ...]:
    return tuple(_pieces(layout, parcel))


def _pieces(layout: WireLayout, parcel: Parcel) -> Iterator[DeltaPiece]:
    dtypes = {spec.name: spec.dtype for spec in layout.specs}
    starts = [each.offset for each in parcel.slices]
    begun = 0
    for number, each in enumerate(parcel.slices):
        is_last = number + 1 == len(starts)
        stop = parcel.num_bytes if is_last else starts[number + 1]
        if is_last or dtypes[parcel.slices[number + 1].box.name] != dtypes[each.box.name]:
            for start in range(begun, stop, codec.CHUNK_BYTES):
                yield DeltaPiece(start=start, stop=min(start + codec.CHUNK_BYTES, stop), dtype=dtypes[each.box.name])
            begun = stop


def pays(cut: Sequence[DeltaPiece], old: torch.Tensor, new: torch.Tensor, bytes_per_s: float) -> bool:
    """Whether the difference is there sooner than the whole parcel, on a wire of this speed."""
    sampled = cut[:: max(1, len(cut) // _SAMPLES)][:_SAMPLES]
    num_bytes = sum(piece.stop - piece.start for piece in sampled)
    started = time.perf_counter()
    size = sum(len(_encoded(piece, old, new)) for piece in sampled)
    computing_s = (time.perf_counter() - started) / _num_threads()
    # Both ends compute at about this speed, and at the same time, as the bytes travel.
    return max(computing_s, size / bytes_per_s) < num_bytes / bytes_per_s


def send_difference(link: Link, cut: Sequence[DeltaPiece], old: torch.Tensor, new: torch.Tensor) -> int:
    """Returns how many bytes travelled."""
    sent = 0
    with ThreadPoolExecutor(_num_threads(), thread_name_prefix="weight-delta") as threads:
        encoding = [threads.submit(_encoded, piece, old, new) for piece in cut]
        for first in range(0, len(cut), _BATCH):
            batch = [future.result() for future in encoding[first : first + _BATCH]]
            link.wait(link.broadcast(torch.tensor([len(each) for each in batch])))
            link.wait(link.broadcast(torch.frombuffer(bytearray(b"".join(batch)), dtype=torch.uint8)))
            sent += sum(map(len, batch))
    link.wait(link.begin_agreement())
    return sent


def receive_difference(link: Link, cut: Sequence[DeltaPiece], image: torch.Tensor, landed: Callable[[int], None]) -> None:
    """Make the old parcel in `image` the new one, in place. `landed` hears up to where it is new."""
    with ThreadPoolExecutor(_num_threads(), thread_name_prefix="weight-delta") as threads:
        applying: list[tuple[DeltaPiece, Future[None]]] = []
        for first in range(0, len(cut), _BATCH):
            batch = cut[first : first + _BATCH]
            sizes = torch.zeros(len(batch), dtype=torch.int64)
            link.wait(link.broadcast(sizes))
            if any(not 0 < size <= piece.stop - piece.start for size, piece in zip(sizes.tolist(), batch, strict=True)):
                raise WireError(f"the sizes of a difference's pieces cannot be true: {sizes.tolist()}")
            made = torch.empty(int(sizes.sum()), dtype=torch.uint8)
            link.wait(link.broadcast(made))
            for piece, part in zip(batch, made.split(sizes.tolist()), strict=True):
                applying.append((piece, threads.submit(_apply, piece, part, image)))
            while applying and applying[0][1].done():
                _land(applying.pop(0), landed)
        for each in applying:
            _land(each, landed)
    link.wait(link.begin_agreement())


def _land(applied: tuple[DeltaPiece, Future[None]], landed: Callable[[int], None]) -> None:
    piece, future = applied
    future.result()
    landed(piece.stop)


def _encoded(piece: DeltaPiece, old: torch.Tensor, new: torch.Tensor) -> bytes:
    """As long as the piece itself when it is the piece itself."""
    before, after = (each[piece.start : piece.stop].numpy() for each in (old, new))
    made = codec.encode(before, after, piece.dtype)
    return made if made is not None else after.tobytes()


def _apply(piece: DeltaPiece, made: torch.Tensor, image: torch.Tensor) -> None:
    place = image[piece.start : piece.stop]
    if len(made) == len(place):
        place.copy_(made)
    else:
        codec.apply(made.numpy().tobytes(), np.asarray(place.numpy()))


def _num_threads() -> int:
    return min(_MAX_THREADS, cpu_count())
