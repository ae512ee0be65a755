"""Sends a parcel as a delta to one that the receivers hold. Pieces are encoded, sent and applied concurrently.

    sender      pieces ──encode, on threads──▶ batch n ──┐ sizes, bytes
    receivers                                            └──▶ batch n ──apply in place, on threads──▶ verified

A piece whose delta is not smaller than the piece is sent whole. `is_faster_as_delta` decides for every push, from a sample of
the pieces and from the speed at which the last whole parcel was sent.

There are two encodings, of which a learner uses one (`encoding_of`): `compact` (compact_codec.py) on a CPU with numba, half the
bytes; `parallel` (parallel_codec.py) where the parcels lie in a GPU's memory, which saves a copy to the host, or without numba.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby, pairwise
from multiprocessing import cpu_count
from typing import Literal

import numpy as np
import torch

from async_rl.errors import WireError
from async_rl.transport.delta import compact_codec, parallel_codec
from async_rl.transport.gpu_stream import on_host, transport_stream
from async_rl.transport.plan import Parcel, WireLayout
from async_rl.transport.wire.process_group import Link

_BATCH = {"compact": 8, "parallel": 1}
"""Pieces per broadcast: enough that latency does not matter, few enough that receivers begin early."""

_SAMPLES = 3
_MAX_THREADS = {"compact": 8, "parallel": 2}

Encoding = Literal["compact", "parallel"]


def encoding_of(device: torch.device) -> Encoding:
    """The encoding of deltas of parcels that lie on a device of this process."""
    return "compact" if device.type == "cpu" and compact_codec.is_available() else "parallel"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaPiece:
    """Bytes [start, stop) of a parcel, all of one dtype."""

    start: int
    stop: int
    dtype: str
    encoding: Encoding


def split_parcel(layout: WireLayout, parcel: Parcel, encoding: Encoding) -> tuple[DeltaPiece, ...]:
    """The parcel in pieces, none across two dtypes."""
    pieces: list[DeltaPiece] = []
    by_dtype = [
        (dtype, next(each).offset) for dtype, each in groupby(parcel.slices, lambda each: layout.spec_of[each.box.name].dtype)
    ]
    for (dtype, begin), (_, end) in pairwise([*by_dtype, ("", parcel.num_bytes)]):
        pieces += split_bytes(begin, end, dtype, encoding)
    return tuple(pieces)


def split_bytes(begin: int, end: int, dtype: str, encoding: Encoding) -> list[DeltaPiece]:
    """Bytes of one dtype in pieces of the encoding's size at most."""
    size = compact_codec.CHUNK_BYTES if encoding == "compact" else parallel_codec.PIECE_BYTES
    return [
        DeltaPiece(start=start, stop=min(start + size, end), dtype=dtype, encoding=encoding)
        for start in range(begin, end, size)
    ]


def is_faster_as_delta(pieces: Sequence[DeltaPiece], old: torch.Tensor, new: torch.Tensor, bytes_per_s: float) -> bool:
    """Whether the delta is expected to arrive sooner than the whole parcel at this transfer speed."""
    sampled = pieces[:: max(1, len(pieces) // _SAMPLES)][:_SAMPLES]
    num_bytes = sum(piece.stop - piece.start for piece in sampled)
    started = time.perf_counter()
    size = sum(len(encoded_piece(piece, old, new)) for piece in sampled)
    computing_s = (time.perf_counter() - started) / num_threads(pieces)
    # Both ends compute at about this speed, and concurrently with the transfer.
    return max(computing_s, size / bytes_per_s) < num_bytes / bytes_per_s


def send_delta(link: Link, pieces: Sequence[DeltaPiece], old: torch.Tensor, new: torch.Tensor, *, transfer_bytes: int) -> int:
    """Send `new` to receivers that hold `old`, at most `transfer_bytes` at once; returns the number of bytes sent."""
    sent, together = 0, _BATCH[pieces[0].encoding]
    with ThreadPoolExecutor(num_threads(pieces), thread_name_prefix="weight-delta") as threads:
        encoding = [threads.submit(encoded_piece, piece, old, new) for piece in pieces]
        for first in range(0, len(pieces), together):
            batch = [future.result() for future in encoding[first : first + together]]
            link.share(torch.tensor([len(each) for each in batch]))
            _share(link, torch.frombuffer(bytearray(b"".join(batch)), dtype=torch.uint8), transfer_bytes)
            sent += sum(map(len, batch))
    link.wait(link.begin_barrier())
    return sent


def receive_delta(
    link: Link,
    pieces: Sequence[DeltaPiece],
    image: torch.Tensor,
    on_received: Callable[[int], None],
    *,
    transfer_bytes: int,
) -> None:
    """Update the old parcel in `image` in place. `on_received` is called with the end of what is updated. Raises WireError."""
    together = _BATCH[pieces[0].encoding]
    with ThreadPoolExecutor(num_threads(pieces), thread_name_prefix="weight-delta") as threads:
        applying: list[tuple[DeltaPiece, Future[None]]] = []
        for first in range(0, len(pieces), together):
            batch = pieces[first : first + together]
            sizes = link.share(torch.zeros(len(batch), dtype=torch.int64)).numpy()
            if np.any(sizes <= 0) or np.any(sizes > [piece.stop - piece.start for piece in batch]):
                raise WireError(f"the sizes of a delta's pieces are impossible: {sizes}")
            made = _share(link, torch.empty(int(sizes.sum()), dtype=torch.uint8), transfer_bytes).numpy()
            for piece, part in zip(batch, np.split(made, np.cumsum(sizes)[:-1]), strict=True):
                applying.append((piece, threads.submit(apply_piece, piece, part, image)))
            while applying and applying[0][1].done():
                _land(applying.pop(0), on_received)
        for each in applying:
            _land(each, on_received)
    link.wait(link.begin_barrier())


def _share(link: Link, data: torch.Tensor, transfer_bytes: int) -> torch.Tensor:
    return torch.cat([link.share(data[at : at + transfer_bytes]) for at in range(0, len(data), transfer_bytes)])


def _land(applied: tuple[DeltaPiece, Future[None]], on_received: Callable[[int], None]) -> None:
    piece, future = applied
    future.result()
    on_received(piece.stop)


def encoded_piece(piece: DeltaPiece, old: torch.Tensor, new: torch.Tensor) -> bytes:
    """The piece's delta, or the piece itself; then the length is that of the piece."""
    before, after = (each[piece.start : piece.stop] for each in (old, new))
    with transport_stream(new.device):
        try:
            if piece.encoding == "compact":
                made = compact_codec.encode(before.numpy(), after.numpy(), piece.dtype)
            else:
                made = parallel_codec.encode(before, after, piece.dtype)
        except torch.OutOfMemoryError:  # the GPU has no room for lists of the changes
            made = None
        return made if made is not None else after.cpu().numpy().tobytes()


def apply_piece(piece: DeltaPiece, made: compact_codec.Image, image: torch.Tensor) -> None:
    """Update the piece of the old parcel in `image` in place. Raises WireError."""
    place = image[piece.start : piece.stop]
    with transport_stream(image.device):
        if len(made) == len(place):
            place.copy_(torch.as_tensor(made))
        elif piece.encoding == "parallel":
            try:
                parallel_codec.apply(made.tobytes(), place)
            except torch.OutOfMemoryError as error:  # next time the parcel comes whole
                raise WireError("the GPU has no room to apply a delta") from error
        else:
            for held in on_host([place]):
                compact_codec.apply(made.tobytes(), held.numpy())
                if held is not place:
                    place.copy_(held, non_blocking=True)


def num_threads(pieces: Sequence[DeltaPiece]) -> int:
    """Threads on which a push encodes or applies them."""
    return min(_MAX_THREADS[pieces[0].encoding], cpu_count())
