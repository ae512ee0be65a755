"""A worker's end of the weight wire.

PushOffer ─▶ PushReady ─▶ PushBegin ─▶ receive parcels, verify (on threads) ─▶ PushStaged ─▶ VersionLive ─▶ swap ─▶ announce
  │ another model, or served │ a failure
  ▼                          ▼
PushRefused                PushFailed: the buffers are abandoned, the next offer starts anew

A worker that starts, or that lacks a version that went live, first tries to fetch it without the learner's help (catch_up.py).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
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
from async_rl.transport.plan import wire_specs
from async_rl.transport.receiving.catch_up import CatchUp
from async_rl.transport.receiving.parcel_receiver import ParcelReceiver
from async_rl.transport.receiving.placement import Placement
from async_rl.transport.receiving.reception import (
    Idle,
    Offered,
    Received,
    ReceiveFailed,
    Receiving,
    Reception,
    ReceptionEvent,
    Staged,
    next_reception,
)
from async_rl.transport.wire.http import is_reachable
from async_rl.types import VersionRecord

Swap = Callable[[int, Mapping[str, torch.Tensor]], Awaitable[None]]
"""Makes the engine serve a version. The tensors belong to the receiver and are overwritten once it has returned."""

_LEAVE_S = 2.0
"""Time limit for leaving the board. It may fail: the listing expires by itself."""

_log = structlog.get_logger(__name__)


class _ReplyFields(TypedDict):
    fence: int
    generation: int
    member: str


def _raise_if_run_was_lost(live: VersionRecord, version: int, timeline: str) -> None:
    """Raise ServiceStopped when a new timeline counts from below the version served: Redis and the run's folder were both lost.

    A running worker never goes back to an older version, so it is restarted and takes the live one.
    """
    if live.version <= version and timeline not in ("", live.timeline):
        raise ServiceStopped(
            f"this worker serves version {version} of a run that was lost; version {live.version} of another is live now"
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Intake:
    """Carries out the states Offered and Receiving."""

    task: asyncio.Task[None]
    begun: asyncio.Future[PushBegin]
    is_ready: asyncio.Event
    """Set once the learner was told so."""


class WeightReceiver:
    """Receives the versions of the run's learner and hands them to the engine, until cancelled."""

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
        placement: Placement | None = None,
    ) -> None:
        """`store`: for the rendezvous of process groups (rendezvous.WIRE_STORE). `placement` None: on the member's device."""
        self._board = board
        self._member = replace(member, catches_up="with what is live")
        place = placement if placement is not None else Placement(devices=(torch.device(member.device),))
        wanted = wire_specs(specs, wire.dtype)
        self._parcels = ParcelReceiver(wanted, place, wire, store)
        self._catch_up = CatchUp(specs=wanted, placement=place, wire=wire, store=store, snapshots=snapshots)
        self._retry_after_s = wire.rendezvous_timeout_s
        """Pause after a failed catch-up; meanwhile the learner's next push may bring the version."""
        self._begin_within_s = 2 * wire.operation_timeout_s
        """The learner waits that long for the other members, at most, before it begins."""
        self._next_catch_up_at = -math.inf
        self._lease_s = lease_s
        self._fence: int | None = None
        """The current learner's fencing token, as last read from the buffer."""
        self._source: PackedSource | None = None
        """The last source read; its layout is not read again."""
        self._state: Reception = Idle()
        self._intake: _Intake | None = None
        self._abandoned = Event()
        """Set to stop the threads that receive or fetch a version that is not needed any more."""
        self._swapping = asyncio.Lock()
        """Until a swap is over the engine reads the staged weights, so no message is handled."""
        self._is_behind = asyncio.Event()
        self._timeline = ""
        """Timeline of the version that the engine serves."""

    @property
    def version(self) -> int:
        """The version that the engine serves; -1 before the first."""
        return self._member.version

    async def run(self, swap: Swap) -> None:
        """Receive versions from the learner, and from any learner that replaces it, until cancelled.

        Raises FleetMismatch when the learner trains a model of other names, shapes or dtypes.
        """
        inbox = await Inbox[ToWorkers].open(self._board, TO_WORKERS, TO_WORKERS_MESSAGES)
        await self._announce()
        try:
            async with asyncio.TaskGroup() as services:
                services.create_task(self._send_heartbeats(swap), name="weight-heartbeat")
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
        consumes: the learner's messages       waits for:    a message
        produces: versions, handed to `swap`   unblocked by: the sender's `push` and `flip`
        """
        while True:
            for message in await inbox.read():
                if not await self._is_current_learner(message.fence):
                    continue
                if isinstance(message, VersionLive):
                    await self._serve(message.record, swap)
                    if self._needs(message.record):
                        self._is_behind.set()
                else:
                    await self._on_push(message, services)

    async def _is_current_learner(self, fence: int) -> bool:
        """Whether the fence is the current one in the buffer. The fence in a message is not trusted."""
        if fence != self._fence:
            self._fence = await self._board.fence()
        return fence == self._fence

    async def _read_source(self) -> PackedSource | None:
        """The current learner's packed versions; None when it has packed none."""
        source = await read_source(self._board, self._source.layout if self._source is not None else None)
        if source is not None:
            self._source = source
        return source

    async def _send_heartbeats(self, swap: Swap) -> None:
        """
        consumes: the live version in Redis       waits for:    a heartbeat interval
        produces: the listing; a late `swap`      unblocked by: the clock
        """
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            # The live version in Redis decides; VersionLive only announces it sooner, and a learner may die before it.
            version, timeline = self.version, self._timeline  # a newer version may be served while Redis answers
            if (live := await self._announce()) is not None:
                _raise_if_run_was_lost(live, version, timeline)
                await self._serve(live, swap)
                if self._needs(live) and time.monotonic() >= self._next_catch_up_at:
                    self._is_behind.set()

    def _advance(self, event: ReceptionEvent) -> tuple[Reception, Reception]:
        """The states before and after the event."""
        before, self._state = self._state, next_reception(self._state, event, self._member)
        return before, self._state

    async def _on_push(self, message: PushOffer | PushBegin | PushCancel, services: asyncio.TaskGroup) -> None:
        async with self._swapping:
            before, after = self._advance(message)
            if after is before:
                return
            if isinstance(after, Receiving) and isinstance(message, PushBegin) and self._intake is not None:
                self._intake.begun.set_result(message)
                return
            had_replied = isinstance(before, Receiving) or (self._intake is not None and self._intake.is_ready.is_set())
            await self._give_up(before)
            if isinstance(after, Offered) and isinstance(message, PushOffer):
                begun: asyncio.Future[PushBegin] = asyncio.get_running_loop().create_future()
                is_ready, self._abandoned = asyncio.Event(), Event()
                receiving = self._receive(message, begun, is_ready, self._abandoned)
                self._intake = _Intake(
                    task=services.create_task(receiving, name="weight-intake"), begun=begun, is_ready=is_ready
                )
                return
        if isinstance(message, PushOffer):
            reason = f"already serves version {self.version}"
            await post(self._board, TO_LEARNER, PushRefused(**self._reply_to(message), reason=reason))
        elif isinstance(message, PushCancel) and had_replied:
            await self._post_failed(message, "the attempt was cancelled")
        elif isinstance(message, PushCancel):  # too late for that offer, but in time for the next one
            await post(self._board, TO_LEARNER, WorkerHello(member=self._member.id))

    async def _give_up(self, state: Reception) -> None:
        """Free what belongs to a state that was left without serving a version, and stop a catch-up."""
        self._abandoned.set()
        if isinstance(state, Offered | Receiving) and self._intake is not None:
            self._intake.task.cancel()
            await asyncio.wait([self._intake.task])
        if isinstance(state, Staged):
            self._parcels.recycle(state.received)

    async def _receive(
        self, offer: PushOffer, begun: asyncio.Future[PushBegin], is_ready: asyncio.Event, abandoned: Event
    ) -> None:
        # A running thread owns the buffers that it writes to. When this task is cancelled, the thread is left to its timeouts:
        # a blocked gloo operation cannot be stopped, so nothing may wait for it.
        try:
            source = await self._read_source()
            if source is None or source.fence != offer.fence:
                raise WireError("the offer is not from the run's current learner")
            expected = await in_daemon_thread(
                lambda: self._parcels.expect_from_learner(offer.record, source), name="weight-offer"
            )
            ready = PushReady(
                **self._reply_to(offer),
                by_memory=tuple(expected.mapped),
                holds=self._parcels.holds,
                is_short_of_descriptors=descriptors_are_scarce(),
            )
            is_ready.set()
            await post(self._board, TO_LEARNER, ready)
            try:
                begin = await self._wait_for_begin(begun)
                received = await in_daemon_thread(
                    lambda: self._parcels.receive(expected, begin, self._member.id, abandoned), name="weight-intake"
                )
            except BaseException:
                expected.unlock()
                raise
        except FleetMismatch as error:
            await post(self._board, TO_LEARNER, PushRefused(**self._reply_to(offer), reason=str(error)))
            raise
        except WireError as error:
            self._advance(ReceiveFailed(offer.attempt))
            await self._post_failed(offer, str(error))
        else:
            self._advance(Received(offer.attempt, received=received))
            await post(self._board, TO_LEARNER, PushStaged(**self._reply_to(offer)))

    async def _wait_for_begin(self, begun: asyncio.Future[PushBegin]) -> PushBegin:
        await asyncio.wait([begun], timeout=self._begin_within_s)
        if not begun.done():
            raise WireError(f"the transfer did not begin within {self._begin_within_s:g} s of the offer")
        return begun.result()

    async def _post_failed(self, message: PushOffer | PushCancel, reason: str) -> None:
        versions = self._source.versions.values() if self._source is not None else ()
        urls = {parcel.url for packed in versions for parcel in packed}
        is_cut_off = await in_daemon_thread(lambda: not all(map(is_reachable, urls)), name="weight-probe")
        await post(self._board, TO_LEARNER, PushFailed(**self._reply_to(message), reason=reason, is_cut_off=is_cut_off))

    async def _serve(self, live: VersionRecord, swap: Swap) -> None:
        """Serve the staged version if it is the live one; drop it if it will never be."""
        async with self._swapping:
            before = self._state
            after = next_reception(before, live, self._member)
            if after is before or not isinstance(before, Staged):
                return
            if is_live := before.record == live:
                await swap(live.version, before.received.weights)
                self._member = replace(self._member, version=live.version)
                self._timeline = live.timeline
            self._parcels.recycle(before.received)
            self._state = after
        if is_live:
            await self._announce()
            _log.debug("serves new weights", member=self._member.id, version=live.version)

    # -- catching up -----------------------------------------------------------------------------------------------------

    def _needs(self, live: VersionRecord) -> bool:
        return self.version < live.version and isinstance(self._state, Idle)

    async def _stay_current(self, swap: Swap) -> None:
        """
        consumes: `_is_behind`                        waits for:    the start; a live version that is not served here
        produces: the live version, a WorkerHello     unblocked by: VersionLive; a heartbeat
        """
        while True:
            await self._is_behind.wait()
            self._is_behind.clear()
            if time.monotonic() >= self._next_catch_up_at and not await self._try_catch_up(swap):
                self._next_catch_up_at = time.monotonic() + self._retry_after_s
            # in either case: to the learner, this worker may have died
            await post(self._board, TO_LEARNER, WorkerHello(member=self._member.id))

    async def _try_catch_up(self, swap: Swap) -> bool:
        """Whether the live version is served or staged now, or a push is bringing it."""
        live, source = await self._board.live_version(), await self._read_source()
        if live is None:
            caught_up = False
            await in_daemon_thread(lambda: self._catch_up.check_model(source), name="weight-catch-up")
        else:
            caught_up = not self._needs(live) or await self._fetch(live, source, swap)
        await self._announce(catches_up="")
        return caught_up

    async def _fetch(self, live: VersionRecord, source: PackedSource | None, swap: Swap) -> bool:
        await self._announce(catches_up=f"with version {live.version}")
        began = self._state
        if not isinstance(began, Idle):  # an offer came meanwhile: the push brings the newest version
            return True
        self._abandoned = abandoned = Event()
        self._parcels.free()  # a GPU has room for the parcels of one version
        try:
            received, where = await in_daemon_thread(
                lambda: self._catch_up.fetch(live, source, abandoned), name="weight-catch-up"
            )
        except WireError as error:
            _log.info(f"waiting for the learner to send weights: cannot fetch version {live.version} ({error})")
            return False
        before, after = self._advance(Received(began.attempt, received=received))
        if after is before:  # an offer came meanwhile
            received.expected.unlock()
            return True
        now_live = await self._board.live_version()
        if now_live is not None:
            await self._serve(now_live, swap)
        if self.version == live.version:
            _log.info(f"serves version {live.version}, from {where}")
        return not self._needs(live)

    async def _announce(self, *, catches_up: str | None = None) -> VersionRecord | None:
        """Renew the listing. Returns the live version."""
        if catches_up is not None:
            self._member = replace(self._member, catches_up=catches_up)
        return await self._board.announce(self._member, self._lease_s)

    def _reply_to(self, message: PushOffer | PushCancel) -> _ReplyFields:
        return {"fence": message.fence, "generation": message.generation, "member": self._member.id}
