"""Sends and receives a parcel over a process group: whole, or as a delta to a version that all receivers hold."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cache
from threading import Event, Thread

import structlog
import torch

from async_rl.config import WireConfig
from async_rl.errors import WireError
from async_rl.transport.delta import compact_codec
from async_rl.transport.delta.parallel_codec import DTYPES
from async_rl.transport.delta.parcel_delta import DeltaPiece, is_faster_as_delta, receive_delta, send_delta
from async_rl.transport.packed_versions import PackedVersions
from async_rl.transport.wire.process_group import Link, OnReceived, broadcast_whole

_WHOLE, _DELTA = 0, 1

_log = structlog.get_logger(__name__)


_COMPILED = Event()


def has_deltas(pieces: Sequence[DeltaPiece]) -> bool:
    """Whether this process can make and apply deltas of a parcel, which has numbers of 16 bits: updates change few of them.

    The first call for `compact` ones starts to compile what they need, on a thread of its own.
    """
    if not any(piece.dtype in DTYPES for piece in pieces):
        return False
    if pieces[0].encoding == "parallel":
        return True
    if not _COMPILED.is_set() and compact_codec.is_available():
        _start_compiling()
    return _COMPILED.is_set()


def compile_deltas() -> None:
    """Compile in the calling thread; takes seconds."""
    for dtype in DTYPES:
        compact_codec.warm_up(dtype)
    _COMPILED.set()


@cache
def _start_compiling() -> None:
    Thread(target=compile_deltas, name="weight-delta", daemon=True).start()


class ParcelSender:
    def __init__(self, versions: PackedVersions, pieces: Sequence[DeltaPiece], wire: WireConfig) -> None:
        self._versions, self._pieces, self._deltas = versions, pieces, wire.deltas
        self._transfer_bytes = int(wire.bucket_mb * (1 << 20))
        self.num_deltas = 0
        """Deltas sent so far, instead of whole parcels."""

    def send(self, link: Link, version: int, base: int, *, may_be_delta: bool = True) -> None:
        """`base`: a version that all receivers hold; -1: there is none."""
        with ExitStack() as held:
            new = held.enter_context(self._versions.open_version(version))
            old = held.enter_context(self._versions.open_version(base)) if base >= 0 and self._versions.has(base) else None
            if old is not None and may_be_delta and self._delta_pays(old, new, link):
                _send_mode(link, _DELTA)
                sent = send_delta(link, self._pieces, old, new, transfer_bytes=self._transfer_bytes)
                self.num_deltas += 1
                _log.debug("sent a delta", version=version, base=base, bytes=sent, of=len(new))
            else:
                if base >= 0:
                    _send_mode(link, _WHOLE)
                started = time.monotonic()
                broadcast_whole(link, new, self._transfer_bytes)
                link.bytes_per_s = len(new) / (time.monotonic() - started)

    def _delta_pays(self, old: torch.Tensor, new: torch.Tensor, link: Link) -> bool:
        if self._deltas == "off" or not has_deltas(self._pieces):
            return False
        if self._deltas == "always":
            return True
        return link.bytes_per_s > 0 and is_faster_as_delta(self._pieces, old, new, link.bytes_per_s)


def receive_parcel(
    link: Link,
    data: torch.Tensor,
    pieces: Sequence[DeltaPiece],
    *,
    may_be_delta: bool,
    holds_base: bool,
    transfer_bytes: int,
    on_received: OnReceived,
) -> None:
    """Fill `data` with the parcel. Raises WireError when that fails.

    `may_be_delta`: the sender was given a base, so it first sends the mode, whole or delta. `holds_base`: `data` is that base.
    """
    if not may_be_delta or _receive_mode(link) == _WHOLE:
        broadcast_whole(link, data, transfer_bytes, on_received)
    elif holds_base:
        receive_delta(link, pieces, data, on_received, transfer_bytes=transfer_bytes)
    else:
        raise WireError("a delta arrived for a version that this worker does not hold")


def _send_mode(link: Link, mode: int) -> None:
    link.share(torch.tensor([mode]))


def _receive_mode(link: Link) -> int:
    return int(link.share(torch.tensor([-1])).item())
