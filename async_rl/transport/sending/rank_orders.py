"""Orders from rank 0 to the other learner ranks, over a store in the run's Redis.

rank 0                                  the store                                  rank k
post(orders) ─────────────────────────▶ FENCE/errands/N ─────────────────────────▶ follow
wait_for_result ◀────────────────────── FENCE/done/N/k ◀────────────────────────── empty, or what failed
wait_for_parcel ◀────────────────────── FENCE/packed/VERSION/k ◀────────────────── tell_parcel, without an order
"""

from __future__ import annotations

import threading
import time
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
from async_rl.transport.delta.parcel_delta import Encoding
from async_rl.transport.messages import Backend
from async_rl.transport.packed_source import PackedParcel
from async_rl.transport.wire.rendezvous import as_wire_error

define("wire.order")

WIRE_ORDERS = "errands"
"""Name of the orders' store among the run's stores (`GroupStores.open`). Workers may not open it."""

_LOOK_UP = timedelta(seconds=2)
"""How long a rank waits for an order before it checks whether it should end: rank 0 may have died."""

_AGAIN_S = 0.1
"""Pause before an invalid order is read again: rank 0 overwrites what another process has written there."""

_PARCELS: TypeAdapter[PackedParcel | str] = TypeAdapter(PackedParcel | str)
"""A parcel that a rank has packed, or why it has none."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteParcel:
    """Write a parcel to the snapshot folder, which is part of every rank's configuration."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
    parcel: int
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SendParcel:
    """Send a parcel to the members of a process group."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
    parcel: int
    version: int
    group: str
    size: Annotated[int, Field(ge=2, le=100_000)]
    """Ranks of the group: the workers and their sender."""
    backend: Backend
    base: int
    """The version that all members hold, so that a delta may be sent; -1: none."""
    deltas: Encoding
    """Encoding in which they read deltas. A rank that has another sends the parcel whole."""


WireOrder = SendParcel | WriteParcel
_ORDERS: TypeAdapter[list[WireOrder] | None] = TypeAdapter(list[WireOrder] | None)
"""None: no more orders will follow."""


class WireOrders:
    """One rank's end of the store of orders."""

    def __init__(self, store: Store, rank: int, *, fence: int) -> None:
        self._store, self._rank, self._fence = store, rank, fence
        self._numbers = count()
        """An iterator, because two threads may post at the same time."""
        self._following: ServiceThread | None = None

    # -- rank 0 --------------------------------------------------------------------------------------------------------

    def post(self, orders: Sequence[WireOrder] | None) -> int:
        """Write orders to the store; returns the number for `wait_for_result`. None: no more will follow."""
        number = next(self._numbers)
        with as_wire_error("orders cannot be written for the other learner ranks"):
            self._store.set(self._order_key(number), _ORDERS.dump_json(None if orders is None else list(orders)).decode())
        return number

    def wait_for_result(self, number: int, rank: int, within_s: float) -> None:
        """Block until the rank has carried out its orders. Raises WireError when it failed, or after `within_s`."""
        key = self._result_key(number, rank)
        with as_wire_error(f"learner rank {rank} does not answer"):
            self._store.wait([key], timedelta(seconds=within_s))
            problem = self._store.get(key).decode(errors="replace")
        if problem:
            raise WireError(problem)

    def wait_for_parcel(self, version: int, rank: int, is_wanted: Callable[[], bool]) -> PackedParcel:
        """Block until the rank has hashed its parcel of a version. Raises WireError when it failed or `is_wanted` is False.

        There is no time limit: a rank that died ends the learner at the next collective of all ranks.
        """
        key = self._parcel_key(version, rank)
        while is_wanted():
            try:
                self._store.wait([key], _LOOK_UP)
                text = self._store.get(key)
            except Exception:  # not yet; or Redis is unreachable
                time.sleep(_AGAIN_S)
                continue
            try:
                parcel = _PARCELS.validate_json(text)
            except ValidationError as error:
                raise WireError(f"what learner rank {rank} says of version {version} is malformed: {error}") from error
            if isinstance(parcel, str):
                raise WireError(f"learner rank {rank}: {parcel}")
            return parcel
        raise WireError(f"version {version} has been given up for newer ones")

    # -- the others ----------------------------------------------------------------------------------------------------

    def tell_parcel(self, version: int, parcel: PackedParcel | str, is_wanted: Callable[[], bool]) -> None:
        """Tell rank 0 this rank's parcel of a version, or why there is none."""
        while is_wanted():
            try:
                self._store.set(self._parcel_key(version, self._rank), _PARCELS.dump_json(parcel).decode())
                return
            except Exception:  # Redis is unreachable
                time.sleep(_AGAIN_S)

    def follow(self, parcel: int | None, run: Callable[[WireOrder], None]) -> None:
        """Carry out the orders for this rank's parcel, on background threads, until `close`."""
        self._following = ServiceThread(lambda thread: self._follow(thread, parcel, run), name="weight-orders").start()

    def close(self) -> None:
        """Stop. Call rank 0's first, then the others return at once; without rank 0 they take up to `_LOOK_UP`."""
        if self._following is not None:
            self._following.stop()
            self._following.join()  # a process that ends while one of its threads uses the store is aborted
        elif self._rank == 0:
            with suppress(WireError):
                self.post(None)

    def _follow(self, thread: ServiceThread, parcel: int | None, run: Callable[[WireOrder], None]) -> None:
        """
        consumes: orders (the store)     waits for:    the next order
        produces: results (the store)    unblocked by: rank 0; `close` within `_LOOK_UP`
        """
        number, last_invalid = 0, -1
        while not thread.is_stopping:
            try:
                self._store.wait([self._order_key(number)], _LOOK_UP)
                text = self._store.get(self._order_key(number))
            except Exception:  # no order for a while; or Redis is unreachable, which rank 0 handles
                thread.pause(_AGAIN_S)
                continue
            try:
                orders = _ORDERS.validate_json(text)
            except ValidationError as error:
                if last_invalid != number:
                    last_invalid = number
                    _log.warning("ignored an invalid order", number=number, problem=str(error).partition("\n")[0])
                thread.pause(_AGAIN_S)
                continue
            if orders is None:
                while not thread.pause(_LOOK_UP.total_seconds()):
                    pass
                return
            for order in orders:
                if order.parcel == parcel:  # on its own thread: an order that waits for dead workers must not delay the next
                    threading.Thread(target=self._report, args=(number, order, run), name="weight-order", daemon=True).start()
            number += 1

    def _report(self, number: int, order: WireOrder, run: Callable[[WireOrder], None]) -> None:
        failpoint("wire.order")
        problem = ""
        try:
            run(order)
        except Exception as error:
            problem = f"learner rank {self._rank}: {error}"
            if not isinstance(error, WireError):
                _log.exception("an order failed")
        with suppress(Exception):  # Redis is unreachable: rank 0 notices that itself, or times out
            self._store.set(self._result_key(number, self._rank), problem)

    def _order_key(self, number: int) -> str:
        return f"{self._fence}/errands/{number}"

    def _parcel_key(self, version: int, rank: int) -> str:
        return f"{self._fence}/packed/{version}/{rank}"

    def _result_key(self, number: int, rank: int) -> str:
        return f"{self._fence}/done/{number}/{rank}"
