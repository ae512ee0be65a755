"""A worker's end of the weight wire.

Offer ─▶ Ready ─▶ Begin ─▶ take the parcels in, verify (on threads) ─▶ Staged ─▶ Flip ─▶ swap ─▶ announce
  │ another model             │ anything breaks
  ▼                           ▼
Refused                     Failed: what was written to is abandoned, the next offer starts afresh
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from threading import Event
from typing import TypedDict

import structlog
import torch

from async_rl.config import HEARTBEAT_S, WireConfig
from async_rl.errors import AsyncRLError, FleetMismatch, ServiceStopped, WireError
from async_rl.parameter_spec import ParameterSpec
from async_rl.protocols import Board, Member
from async_rl.supervision.daemon_thread import in_daemon_thread
from async_rl.transport.intake import Intake, Landing
from async_rl.transport.link import Timeouts
from async_rl.transport.messages import (
    TO_LEARNER,
    TO_WORKERS,
    TO_WORKERS_MESSAGES,
    Begin,
    Cancel,
    Failed,
    Flip,
    Hello,
    Inbox,
    Left,
    Offer,
    Ready,
    Refused,
    Staged,
    ToWorkers,
    post,
)
from async_rl.transport.plan import on_the_wire
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Taking:
    """An attempt under way."""

    offer: Offer
    task: asyncio.Task[None]
    begun: asyncio.Future[Begin]
    released: Event


class WeightReceiver:
    def __init__(
        self, board: Board, member: Member, specs: Sequence[ParameterSpec], wire: WireConfig, *, lease_s: float
    ) -> None:
        self._board = board
        self._member = member
        timeouts = Timeouts(rendezvous_s=wire.rendezvous_timeout_s, operation_s=wire.operation_timeout_s)
        self._intake = Intake(on_the_wire(specs, wire.dtype), torch.device(member.device), timeouts)
        self._lease_s = lease_s
        self._newest = (-1, -1)
        """Fence and generation of the newest offer: whatever is older comes from a learner or an attempt that is over."""
        self._taking: _Taking | None = None
        self._staged: Landing | None = None
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
                await self._hello()
                await self._follow(inbox, swap, services)
        finally:
            with suppress(TimeoutError, AsyncRLError):
                async with asyncio.timeout(_LEAVE_S):
                    await self._board.leave(self._member.id)
                    await post(self._board, TO_LEARNER, Left(member=self._member.id))

    async def _follow(self, inbox: Inbox[ToWorkers], swap: Swap, services: asyncio.TaskGroup) -> None:
        """
        consumes: what the learner says        waits for:    a message
        produces: versions, handed to `swap`   unblocked by: the sender's push and flip
        """
        while True:
            for message in await inbox.read():
                if message.fence < self._newest[0]:
                    continue
                match message:
                    case Offer():
                        await self._consider(message, services)
                    case Begin():
                        self._begin(message)
                    case Cancel():
                        await self._cancel(message)
                    case Flip():
                        await self._flip(message.record, swap)
                        await self._ask_if_left_behind(message.record)

    async def _stay_listed(self, swap: Swap) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            await self._announce()
            # The board's table decides what is live; a Flip only says so sooner. A learner that died in between is no matter.
            if (live := await self._board.live_version()) is not None:
                self._raise_if_set_back(live)
                await self._flip(live, swap)

    def _raise_if_set_back(self, live: VersionRecord) -> None:
        """Another learner counts from below what is served here: Redis and the run's folder were both lost. No version goes
        back in a living worker, so it starts again and takes whatever is live then.
        """
        if live.version <= self.version and self._timeline not in ("", live.timeline):
            raise ServiceStopped(
                f"this worker serves version {self.version} of a run that was lost; "
                f"version {live.version} of another is live now"
            )

    async def _consider(self, offer: Offer, services: asyncio.TaskGroup) -> None:
        if self._member.id not in offer.to or offer.attempt <= self._newest:
            return
        self._newest = offer.attempt
        await self._let_go()
        if self.version >= offer.record.version:
            reason = f"already serves version {self.version}"
            await post(self._board, TO_LEARNER, Refused(**self._reply_to(offer), reason=reason))
            return
        begun: asyncio.Future[Begin] = asyncio.get_running_loop().create_future()
        released = Event()
        task = services.create_task(self._take(offer, begun, released), name="weight-intake")
        self._taking = _Taking(offer=offer, task=task, begun=begun, released=released)

    def _begin(self, begin: Begin) -> None:
        taking = self._taking
        if taking is None or begin.attempt != taking.offer.attempt or taking.begun.done():
            return
        if self._member.id in begin.members:
            taking.begun.set_result(begin)
        else:
            taking.begun.cancel()

    async def _take(self, offer: Offer, begun: asyncio.Future[Begin], released: Event) -> None:
        # While a thread runs, what it writes to is its alone. If this task is cancelled that is left to it and to its timeouts:
        # nothing can stop a blocked gloo operation, so nothing may wait for one.
        try:
            expected = await in_daemon_thread(lambda: self._intake.expect(offer), name="weight-offer")
            by_memory = tuple(expected.mapped)
            await post(self._board, TO_LEARNER, Ready(**self._reply_to(offer), by_memory=by_memory))
            try:
                begin = await begun
                self._staged = await in_daemon_thread(
                    lambda: self._intake.receive(expected, begin, self._member.id, released), name="weight-intake"
                )
            except BaseException:
                expected.let_go()
                raise
        except FleetMismatch as error:
            await post(self._board, TO_LEARNER, Refused(**self._reply_to(offer), reason=str(error)))
            raise FleetMismatch(
                f"this worker's model is not the learner's: {error}; start both with the same `model:` section"
            ) from error
        except WireError as error:
            await post(self._board, TO_LEARNER, Failed(**self._reply_to(offer), reason=str(error)))
        else:
            await post(self._board, TO_LEARNER, Staged(**self._reply_to(offer)))

    async def _cancel(self, cancel: Cancel) -> None:
        if cancel.attempt != self._newest or self._staged is not None:
            return
        await self._let_go()
        failed = Failed(fence=cancel.fence, generation=cancel.generation, member=self._member.id, reason="the attempt broke")
        await post(self._board, TO_LEARNER, failed)

    async def _let_go(self) -> None:
        """Forget the attempt under way and whatever is staged but not served."""
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

    async def _ask_if_left_behind(self, live: VersionRecord) -> None:
        on_its_way = self._taking is not None and not self._taking.task.done()
        if self.version < live.version and not on_its_way:
            await self._hello()

    async def _hello(self) -> None:
        await post(self._board, TO_LEARNER, Hello(member=self._member.id))

    async def _announce(self) -> None:
        await self._board.announce(self._member, self._lease_s)

    def _reply_to(self, offer: Offer) -> _ReplyFields:
        return {"fence": offer.fence, "generation": offer.generation, "member": self._member.id}
