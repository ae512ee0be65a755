"""What rank 0 has the other ranks do, over a store in the run's Redis.

rank 0                                  the store                                  rank k
give(jobs) ───────────────────────────▶ FENCE/errands/N ─────────────────────────▶ follow
outcome ◀────────────────────────────── FENCE/done/N/k ◀────────────────────────── what became of it
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from typing import Annotated, ClassVar

import structlog
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from async_rl.durable.failpoints import define, failpoint
from async_rl.errors import WireError
from async_rl.supervision import ServiceThread
from async_rl.transport.messages import Backend
from async_rl.transport.wire.rendezvous import as_wire_error

define("wire.errand")

WIRE_ORDERS = "errands"
"""The name of their store among the run's (`GroupStores.open`). Workers have no business there."""

_LOOK_UP = timedelta(seconds=2)
"""How long a rank waits for an errand before it looks whether it should end: rank 0 may be gone without a word."""

_AGAIN_S = 0.1
"""After which an errand that cannot be read is read again: rank 0 writes over what somebody else has written."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteParcel:
    """Write a parcel down, for workers that come when nobody can send it. Where: every rank's configuration says."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
    parcel: int
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SendParcel:
    """Bring a parcel to a cohort of workers."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
    parcel: int
    version: int
    group: str
    size: Annotated[int, Field(ge=2, le=100_000)]
    """Of the group: the workers, and their sender."""
    backend: Backend
    base: int
    """The version that all of them hold, to which a difference may be sent; -1 if there is none."""


WireOrder = SendParcel | WriteParcel
_TOLD: TypeAdapter[list[WireOrder] | None] = TypeAdapter(list[WireOrder] | None)
"""None: there will be no more."""


class WireOrders:
    """One rank's end."""

    def __init__(self, store: Store, rank: int, *, fence: int) -> None:
        self._store, self._rank, self._fence = store, rank, fence
        self._numbers = count()
        """Two threads may give some out at the same time."""
        self._following: ServiceThread | None = None

    # -- rank 0 --------------------------------------------------------------------------------------------------------

    def give(self, errands: Sequence[WireOrder] | None) -> int:
        """Returns the number to ask for their outcome with."""
        number = next(self._numbers)
        with as_wire_error("the other ranks cannot be told"):
            self._store.set(self._errand(number), _TOLD.dump_json(None if errands is None else list(errands)).decode())
        return number

    def outcome(self, number: int, rank: int, within_s: float) -> None:
        """Returns when the rank has done its part; raises WireError when it could not."""
        key = self._done(number, rank)
        with as_wire_error(f"learner rank {rank} does not answer"):
            self._store.wait([key], timedelta(seconds=within_s))
            problem = self._store.get(key).decode(errors="replace")
        if problem:
            raise WireError(problem)

    # -- the others ----------------------------------------------------------------------------------------------------

    def follow(self, parcel: int | None, run: Callable[[WireOrder], None]) -> None:
        """Run what rank 0 wants done with this rank's parcel, on a thread, until `close`."""
        self._following = ServiceThread(lambda thread: self._follow(thread, parcel, run), name="weight-errands").start()

    def close(self) -> None:
        """Rank 0 has said before that there will be no more, so this does not wait; if it is gone, `_LOOK_UP` at most."""
        if self._following is not None:
            self._following.stop()
            self._following.join()  # a process that ends while a thread of its is in the store is aborted
        elif self._rank == 0:
            with suppress(WireError):
                self.give(None)

    def _follow(self, thread: ServiceThread, parcel: int | None, run: Callable[[WireOrder], None]) -> None:
        number, is_told_of = 0, -1
        while not thread.is_stopping:
            try:
                self._store.wait([self._errand(number)], _LOOK_UP)
                text = self._store.get(self._errand(number))
            except Exception:  # nothing to do for a while; or no Redis answers, and rank 0 decides what that means
                thread.pause(_AGAIN_S)
                continue
            try:
                told = _TOLD.validate_json(text)
            except ValidationError as error:
                if is_told_of != number:
                    is_told_of = number
                    _log.warning("ignored what is no errand", number=number, problem=str(error).partition("\n")[0])
                thread.pause(_AGAIN_S)
                continue
            if told is None:
                while not thread.pause(_LOOK_UP.total_seconds()):
                    pass
                return
            for errand in told:
                if errand.parcel == parcel:  # on its own thread: one that waits for the dead delays no other
                    threading.Thread(target=self._report, args=(number, errand, run), name="weight-errand", daemon=True).start()
            number += 1

    def _report(self, number: int, errand: WireOrder, run: Callable[[WireOrder], None]) -> None:
        failpoint("wire.errand")
        problem = ""
        try:
            run(errand)
        except Exception as error:
            problem = f"learner rank {self._rank}: {error}"
            if not isinstance(error, WireError):
                _log.exception("an errand failed")
        with suppress(Exception):  # no Redis answers: rank 0 hears that, or the silence
            self._store.set(self._done(number, self._rank), problem)

    def _errand(self, number: int) -> str:
        return f"{self._fence}/errands/{number}"

    def _done(self, number: int, rank: int) -> str:
        return f"{self._fence}/done/{number}/{rank}"
