"""A worker's end of the weight wire.

PushOffer ─▶ PushReady ─▶ PushBegin ─▶ take the parcels in, verify (on threads) ─▶ PushStaged ─▶ VersionLive ─▶ swap ─▶ announce
  │ another model             │ anything breaks
  ▼                           ▼
PushRefused                     PushFailed: what was written to is abandoned, the next offer starts afresh

Whoever starts, or sees a version go live that it does not hold, first tries to come by it alone (catch_up.py).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event
from typing import TypedDict

import structlog
import torch
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from async_rl.board.inbox import Inbox, post
from async_rl.config import HEARTBEAT_S, WireConfig
from async_rl.errors import AsyncRLError, FleetMismatch, ServiceStopped, WireError
from async_rl.models.parameter_spec import ParameterSpec
from async_rl.protocols import Board, Member
from async_rl.supervision.liveness.daemon_thread import in_daemon_thread
from async_rl.supervision.processes.descriptors import descriptors_are_scarce
from async_rl.transport.messages import (
    TO_LEARNER,
    TO_WORKERS,
    TO_WORKERS_MESSAGES,
    PushBegin,
    PushCancel,
    PushFailed,
    PushOffer,
    PushReady,
    PushRefused,
    PushStaged,
    ToWorkers,
    VersionLive,
    WorkerHello,
    WorkerLeft,
)
from async_rl.transport.packed_source import PackedSource, read_source
from async_rl.transport.plan import on_the_wire
from async_rl.transport.receiving.catch_up import CatchUp
from async_rl.transport.receiving.intake import ParcelReceiver, ReceivedVersion
from async_rl.transport.wire.process_group import WireTimeouts
from async_rl.types import VersionRecord

Swap = Callable[[int, Mapping[str, torch.Tensor]], Awaitable[None]]
"""Makes the engine serve a version. The tensors are the receiver's own: they are overwritten once it has returned."""

_LEAVE_S = 2.0
"""A farewell is a courtesy: without it the listing lapses by itself."""

_log = structlog.get_logger(__name__)


class _ReplyFields(TypedDict):
    fence: int
    generation: int
    member: str


@contextmanager
def _naming_the_model() -> Iterator[None]:
    try:
        yield
    except FleetMismatch as error:
        raise FleetMismatch(
            f"this worker's model is not the learner's: {error}; start both with the same `model:` section"
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Taking:
    """An attempt under way."""

    offer: PushOffer
    task: asyncio.Task[None]
    begun: asyncio.Future[PushBegin]
    released: Event


class WeightReceiver:
    def __init__(
        self,
        board: Board,
        store: Store,
        member: Member,
        specs: Sequence[ParameterSpec],
        wire: WireConfig,
        *,
        lease_s: float,
        snapshots: Path | None = None,
    ) -> None:
        """`store`: where process groups meet (meeting.STORE)."""
        self._board = board
        self._member = replace(member, catches_up="with what is live")
        timeouts = WireTimeouts(rendezvous_s=wire.rendezvous_timeout_s, operation_s=wire.operation_timeout_s)
        device, wanted = torch.device(member.device), on_the_wire(specs, wire.dtype)
        self._intake = ParcelReceiver(wanted, device, timeouts, store)
        self._catching_up = CatchUp(specs=wanted, device=device, wire=wire, store=store, snapshots=snapshots)
        self._patience_s = wire.rendezvous_timeout_s
        """After a failure to come by a version alone it is left to the learner for so long."""
        self._alone_from = -math.inf
        self._lease_s = lease_s
        self._fence: int | None = None
        """The learner's, as last seen in the buffer."""
        self._source: PackedSource | None = None
        """The last learner that was read of; its layout need not be read again."""
        self._newest = (-1, -1)
        """Fence and generation of the newest offer: what is older comes from an attempt that is over."""
        self._taking: _Taking | None = None
        self._staged: ReceivedVersion | None = None
        self._is_behind = asyncio.Event()
        self._fetching = Event()
        """Set when what is fetched alone is of no more use."""
        self._swapping = asyncio.Lock()
        self._timeline = ""
        """Of the weights that the engine serves."""

    @property
    def version(self) -> int:
        """What the engine serves; -1 before the first weights."""
        return self._member.version

    async def run(self, swap: Swap) -> None:
        """Follow the learner, and every learner after it, until cancelled.

        Raises FleetMismatch when the learner trains a model of other names, shapes or dtypes.
        """
        inbox = await Inbox.open(self._board, TO_WORKERS, TO_WORKERS_MESSAGES)
        await self._announce()
        try:
            async with asyncio.TaskGroup() as services:
                services.create_task(self._stay_listed(swap), name="weight-heartbeat")
                services.create_task(self._stay_current(swap), name="weight-catch-up")
                self._is_behind.set()
                await self._follow(inbox, swap, services)
        finally:
            with suppress(TimeoutError, AsyncRLError):
                async with asyncio.timeout(_LEAVE_S):
                    await self._board.leave(self._member.id)
                    await post(self._board, TO_LEARNER, WorkerLeft(member=self._member.id))

    async def _follow(self, inbox: Inbox[ToWorkers], swap: Swap, services: asyncio.TaskGroup) -> None:
        """
        consumes: what the learner says        waits for:    a message
        produces: versions, handed to `swap`   unblocked by: the sender's push and flip
        """
        while True:
            for message in await inbox.read():
                if not await self._is_the_learners(message.fence):
                    continue
                match message:
                    case PushOffer():
                        await self._consider(message, services)
                    case PushBegin():
                        self._begin(message)
                    case PushCancel():
                        await self._cancel(message)
                    case VersionLive():
                        await self._flip(message.record, swap)
                        if self._lacks(message.record):
                            self._is_behind.set()

    async def _is_the_learners(self, fence: int) -> bool:
        """Only the buffer says who the learner is: a message may say anything."""
        if fence != self._fence:
            self._fence = await self._board.fence()
        return fence == self._fence

    async def _read_source(self) -> PackedSource | None:
        """The learner that holds the run, if it has packed anything."""
        source = await read_source(self._board, self._source.layout if self._source is not None else None)
        if source is not None:
            self._source = source
        return source

    async def _stay_listed(self, swap: Swap) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            await self._announce()
            # The live version in Redis decides; VersionLive only announces it sooner, and a learner may die before it.
            if (live := await self._board.live_version()) is not None:
                self._raise_if_set_back(live)
                await self._flip(live, swap)
                if self._lacks(live) and time.monotonic() >= self._alone_from:
                    self._is_behind.set()

    def _raise_if_set_back(self, live: VersionRecord) -> None:
        """Another learner counts from below what is served here: Redis and the run's folder were both lost. No version goes
        back in a living worker, so it starts again and takes whatever is live then.
        """
        if live.version <= self.version and self._timeline not in ("", live.timeline):
            raise ServiceStopped(
                f"this worker serves version {self.version} of a run that was lost; "
                f"version {live.version} of another is live now"
            )

    async def _consider(self, offer: PushOffer, services: asyncio.TaskGroup) -> None:
        is_old = offer.fence == self._newest[0] and offer.generation <= self._newest[1]
        if self._member.id not in offer.to or is_old:
            return
        self._newest = offer.attempt
        await self._let_go()
        if self.version >= offer.record.version:
            reason = f"already serves version {self.version}"
            await post(self._board, TO_LEARNER, PushRefused(**self._reply_to(offer), reason=reason))
            return
        begun: asyncio.Future[PushBegin] = asyncio.get_running_loop().create_future()
        released = Event()
        task = services.create_task(self._take(offer, begun, released), name="weight-intake")
        self._taking = _Taking(offer=offer, task=task, begun=begun, released=released)

    def _begin(self, begin: PushBegin) -> None:
        taking = self._taking
        if taking is None or begin.attempt != taking.offer.attempt or taking.begun.done():
            return
        if self._member.id in begin.members:
            taking.begun.set_result(begin)
        else:
            taking.begun.cancel()

    async def _take(self, offer: PushOffer, begun: asyncio.Future[PushBegin], released: Event) -> None:
        # While a thread runs, what it writes to is its alone. If this task is cancelled that is left to it and to its timeouts:
        # nothing can stop a blocked gloo operation, so nothing may wait for one.
        try:
            source = await self._read_source()
            if source is None or source.fence != offer.fence:
                raise WireError("the learner that offers it does not hold the run")
            with _naming_the_model():
                expected = await in_daemon_thread(lambda: self._intake.expect(offer.record, source), name="weight-offer")
            by_memory = tuple(expected.mapped)
            ready = PushReady(
                **self._reply_to(offer),
                by_memory=by_memory,
                holds=self._intake.holds,
                is_short_of_descriptors=descriptors_are_scarce(),
            )
            await post(self._board, TO_LEARNER, ready)
            try:
                begin = await begun
                self._staged = await in_daemon_thread(
                    lambda: self._intake.receive(expected, begin, self._member.id, released), name="weight-intake"
                )
            except BaseException:
                expected.let_go()
                raise
        except FleetMismatch as error:
            await post(self._board, TO_LEARNER, PushRefused(**self._reply_to(offer), reason=str(error)))
            raise
        except WireError as error:
            await post(self._board, TO_LEARNER, PushFailed(**self._reply_to(offer), reason=str(error)))
        else:
            await post(self._board, TO_LEARNER, PushStaged(**self._reply_to(offer)))

    async def _cancel(self, cancel: PushCancel) -> None:
        if cancel.attempt != self._newest or self._staged is not None:
            return
        await self._let_go()
        failed = PushFailed(
            fence=cancel.fence, generation=cancel.generation, member=self._member.id, reason="the attempt broke"
        )
        await post(self._board, TO_LEARNER, failed)

    async def _let_go(self) -> None:
        """Forget the attempt under way, what is being fetched alone, and whatever is staged but not served."""
        self._fetching.set()
        if self._taking is not None:
            self._taking.released.set()
            self._taking.task.cancel()
            await asyncio.wait([self._taking.task])
            self._taking = None
        async with self._swapping:
            if self._staged is not None:
                self._intake.recycle(self._staged)
                self._staged = None

    async def _flip(self, live: VersionRecord, swap: Swap) -> None:
        async with self._swapping:
            landing = self._staged
            if landing is None or landing.expected.record != live or live.version <= self.version:
                return
            await swap(live.version, landing.weights)
            self._intake.recycle(landing)
            self._staged = None
            self._member = replace(self._member, version=live.version)
            self._timeline = live.timeline
        await self._announce()
        _log.debug("serves new weights", member=self._member.id, version=live.version)

    # -- alone ---------------------------------------------------------------------------------------------------------

    def _lacks(self, live: VersionRecord) -> bool:
        on_its_way = self._staged is not None or (self._taking is not None and not self._taking.task.done())
        return self.version < live.version and not on_its_way

    async def _stay_current(self, swap: Swap) -> None:
        """
        consumes: signs of being behind                   waits for:    the start; a version that is live and not here
        produces: the live version if it can; a WorkerHello     unblocked by: the learner's flip; a heartbeat
        """
        while True:
            await self._is_behind.wait()
            self._is_behind.clear()
            if time.monotonic() >= self._alone_from and not await self._catch_up(swap):
                self._alone_from = time.monotonic() + self._patience_s
            await self._hello()  # either way: to whoever knew it before, it may have died

    async def _catch_up(self, swap: Swap) -> bool:
        """Whether the live version is here now, or on its way."""
        live, source = await self._board.live_version(), await self._read_source()
        if live is None:
            caught_up = False
            with _naming_the_model():
                await in_daemon_thread(lambda: self._catching_up.check(source), name="weight-catch-up")
        else:
            caught_up = not self._lacks(live) or await self._fetch(live, source, swap)
        await self._announce(catches_up="")
        return caught_up

    async def _fetch(self, live: VersionRecord, source: PackedSource | None, swap: Swap) -> bool:
        await self._announce(catches_up=f"with version {live.version}")
        newest = self._newest
        self._fetching = released = Event()
        try:
            with _naming_the_model():
                landing, where = await in_daemon_thread(
                    lambda: self._catching_up.fetch(live, source, released), name="weight-catch-up"
                )
        except WireError as error:
            _log.info(f"waits for the learner to send weights: cannot come by version {live.version} alone ({error})")
            return False
        if self._newest != newest:  # an offer came meanwhile: the learner brings what is newest
            self._intake.recycle(landing)
            return True
        self._staged = landing
        now_live = await self._board.live_version()
        if now_live is not None:
            await self._flip(now_live, swap)
        if self.version == live.version:
            _log.info(f"serves version {live.version}, from {where}")
        if self._staged is not landing:
            return True
        await self._let_go()  # the live version is newer by now
        return False

    async def _hello(self) -> None:
        await post(self._board, TO_LEARNER, WorkerHello(member=self._member.id))

    async def _announce(self, *, catches_up: str | None = None) -> None:
        if catches_up is not None:
            self._member = replace(self._member, catches_up=catches_up)
        await self._board.announce(self._member, self._lease_s)

    def _reply_to(self, offer: PushOffer) -> _ReplyFields:
        return {"fence": offer.fence, "generation": offer.generation, "member": self._member.id}
