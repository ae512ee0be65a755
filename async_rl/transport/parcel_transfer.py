"""How a parcel travels over a process group: whole, or as its difference to what everybody there holds."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from threading import Event, Thread

import structlog
import torch

from async_rl.config import WireConfig
from async_rl.errors import ConfigError, WireError
from async_rl.transport.delta import codec
from async_rl.transport.delta.difference import DeltaPiece, pays, receive_difference, send_difference
from async_rl.transport.packed_versions import PackedVersions
from async_rl.transport.wire.process_group import Link, OnReceived, receive_parcel, send_parcel

_WHOLE, _DIFFERENCE = 0, 1

_log = structlog.get_logger(__name__)


class DeltaCompiler:
    """Differences need compiled code: it is made beside everything else, and until then parcels travel whole."""

    def __init__(self) -> None:
        self._begun = False
        self._compiled = Event()

    @property
    def is_there(self) -> bool:
        """The first question starts the compiler."""
        if not self._begun and codec.is_available():
            self._begun = True
            Thread(target=self.compile, name="weight-delta", daemon=True).start()
        return self._compiled.is_set()

    def compile(self) -> None:
        """Takes seconds."""
        self._begun = True
        for dtype in _SPARSE:
            codec.warm_up(dtype)
        self._compiled.set()


_SPARSE = ("bfloat16", "float16")
"""In these an update changes few elements: the others' steps are too small to show. In float32 all of them change."""

DELTA_COMPILER = DeltaCompiler()
"""One for the process: compiled is compiled."""


def can_differ(cut: Sequence[DeltaPiece]) -> bool:
    return any(piece.dtype in _SPARSE for piece in cut)


class ParcelSender:
    """A sender's."""

    def __init__(self, outbox: PackedVersions, cut: Sequence[DeltaPiece], wire: WireConfig) -> None:
        if wire.deltas == "always" and not codec.is_available():
            raise ConfigError("wire.deltas: always needs the extra: pip install 'async-rl[delta]', or use `auto`")
        self._outbox, self._cut, self._deltas = outbox, cut, wire.deltas
        self._transfer_bytes = int(wire.bucket_mb * (1 << 20))
        self.num_differences = 0
        """Sent so far."""

    def send(self, link: Link, version: int, base: int) -> None:
        with ExitStack() as held:
            new = held.enter_context(self._outbox.reading(version))
            old = held.enter_context(self._outbox.reading(base)) if base >= 0 and self._outbox.has(base) else None
            if old is not None and self._is_worth_it(old, new, link):
                _tell(link, _DIFFERENCE)
                sent = send_difference(link, self._cut, old, new)
                self.num_differences += 1
                _log.debug("sent a difference", version=version, base=base, bytes=sent, of=len(new))
            else:
                if base >= 0:
                    _tell(link, _WHOLE)
                started = time.monotonic()
                send_parcel(link, new, self._transfer_bytes)
                link.bytes_per_s = len(new) / (time.monotonic() - started)

    def _is_worth_it(self, old: torch.Tensor, new: torch.Tensor, link: Link) -> bool:
        if self._deltas == "off" or old.device.type != "cpu" or not can_differ(self._cut) or not DELTA_COMPILER.is_there:
            return False
        return self._deltas == "always" or (link.bytes_per_s > 0 and pays(self._cut, old, new, link.bytes_per_s))


def receive(
    link: Link,
    data: torch.Tensor,
    cut: Sequence[DeltaPiece],
    *,
    may_differ: bool,
    holds_base: bool,
    transfer_bytes: int,
    landed: OnReceived,
) -> None:
    """`may_differ`: the sender was given a base, so it says first how the parcel travels. `holds_base`: `data` is that base."""
    if not may_differ or _hear(link) == _WHOLE:
        receive_parcel(link, data, transfer_bytes, landed)
    elif holds_base:
        receive_difference(link, cut, data, landed)
    else:
        raise WireError("a difference arrived for a version that this worker does not hold")


def _tell(link: Link, what: int) -> None:
    link.wait(link.broadcast(link.number(what)))


def _hear(link: Link) -> int:
    told = link.number(-1)
    link.wait(link.broadcast(told))
    return int(told.item())
