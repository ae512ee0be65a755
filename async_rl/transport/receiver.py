"""A worker's end of the weight wire.

Offer ─▶ Ready ─▶ Begin ─▶ receive into staging, verify (on a thread) ─▶ Staged ─▶ Flip ─▶ swap ─▶ announce
  │ other shapes              │ anything breaks
  ▼                           ▼
Refused                     Failed: the buffers are abandoned, the next offer starts afresh
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
from async_rl.transport.plan import Transfer, manifest_difference, manifest_digest, plan_transfers
from async_rl.transport.staging import Staging
from async_rl.transport.wire_process_group import Meeting, Seat, Timeouts, link, receive_weights
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _StagedWeights:
    record: VersionRecord
    staging: Staging


@dataclass(frozen=True, slots=True, kw_only=True)
class _Receiving:
    """An attempt under way."""

    offer: Offer
    task: asyncio.Task[None]
    released: Event


class WeightReceiver:
    def __init__(
        self, board: Board, member: Member, specs: Sequence[ParameterSpec], wire: WireConfig, *, lease_s: float
    ) -> None:
        self._board = board
        self._member = member
        self._specs = tuple(specs)
        self._manifest = manifest_digest(self._specs)
        self._device = torch.device(member.device)
        self._timeouts = Timeouts(rendezvous_s=wire.rendezvous_timeout_s, operation_s=wire.operation_timeout_s)
        self._lease_s = lease_s
        self._newest = (-1, -1)
        """Fence and generation of the newest offer: whatever is older comes from a learner or an attempt that is over."""
        self._offer: Offer | None = None
        """Accepted, and waiting for its Begin."""
        self._receiving: _Receiving | None = None
        self._staged: _StagedWeights | None = None
        self._spare: Staging | None = None
        """Buffers that no thread writes to and nobody reads."""
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
                        await self._consider(message)
                    case Begin():
                        self._begin(message, services)
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

    async def _consider(self, offer: Offer) -> None:
        if self._member.id not in offer.to or offer.attempt <= self._newest:
            return
        self._newest = offer.attempt
        await self._let_go()
        if self.version >= offer.record.version:
            reason = f"already serves version {self.version}"
            await post(self._board, TO_LEARNER, Refused(**self._reply_to(offer), reason=reason))
        elif self._manifest != offer.manifest:
            await self._refuse_model(offer)
        else:
            self._offer = offer
            await post(self._board, TO_LEARNER, Ready(**self._reply_to(offer)))

    async def _refuse_model(self, offer: Offer) -> None:
        try:
            sent = await asyncio.to_thread(self._read_manifest, offer)
        except WireError:
            return  # that sender is gone, and its offer with it; the next one will say it again
        reason = manifest_difference(sent, self._specs)
        await post(self._board, TO_LEARNER, Refused(**self._reply_to(offer), reason=reason))
        raise FleetMismatch(f"this worker's model is not the learner's: {reason}; start both with the same `model:` section")

    def _read_manifest(self, offer: Offer) -> list[ParameterSpec]:
        return Meeting.join(offer.host, offer.port, self._timeouts.operation_s).read_manifest()

    def _begin(self, begin: Begin, services: asyncio.TaskGroup) -> None:
        offer, self._offer = self._offer, None
        if offer is None or begin.attempt != offer.attempt or self._member.id not in begin.members:
            return
        seat = Seat(
            rank=begin.members.index(self._member.id) + 1,
            size=len(begin.members) + 1,
            device=self._device,
            backend=offer.backend,
            timeouts=self._timeouts,
            released=Event(),
        )
        task = services.create_task(self._receive(offer, seat), name="weight-receive")
        self._receiving = _Receiving(offer=offer, task=task, released=seat.released)

    async def _receive(self, offer: Offer, seat: Seat) -> None:
        # While the thread runs, the buffers are its alone. If this task is cancelled they are left to it and to its timeouts:
        # nothing can stop a blocked gloo operation, so nothing may wait for one.
        spare, self._spare = self._spare, None
        try:
            staging, digest = await asyncio.to_thread(self._receive_blocking, offer, seat, spare)
            if digest != offer.record.digest:
                self._spare = staging
                raise WireError(f"the weights that arrived have digest {digest}, published was {offer.record.digest}")
        except WireError as error:
            await post(self._board, TO_LEARNER, Failed(**self._reply_to(offer), reason=str(error)))
        else:
            self._staged = _StagedWeights(record=offer.record, staging=staging)
            await post(self._board, TO_LEARNER, Staged(**self._reply_to(offer)))

    def _receive_blocking(self, offer: Offer, seat: Seat, spare: Staging | None) -> tuple[Staging, str]:
        transfers = plan_transfers(self._specs, offer.bucket_bytes)
        staging = spare if spare is not None and spare.transfers == transfers else self._allocate(transfers)
        meeting = Meeting.join(offer.host, offer.port, self._timeouts.rendezvous_s)
        with link(meeting, seat) as wire:
            return staging, receive_weights(wire, transfers, staging)

    def _allocate(self, transfers: Sequence[Transfer]) -> Staging:
        return Staging(self._specs, transfers, self._device)

    async def _cancel(self, cancel: Cancel) -> None:
        if cancel.attempt != self._newest or self._staged is not None:
            return
        await self._let_go()
        failed = Failed(fence=cancel.fence, generation=cancel.generation, member=self._member.id, reason="the attempt broke")
        await post(self._board, TO_LEARNER, failed)

    async def _let_go(self) -> None:
        """Forget the attempt under way and whatever is staged but not served."""
        self._offer = None
        if self._receiving is not None:
            self._receiving.released.set()
            self._receiving.task.cancel()
            await asyncio.wait([self._receiving.task])
            self._receiving = None
        async with self._swapping:
            if self._staged is not None:
                self._spare, self._staged = self._staged.staging, None

    async def _flip(self, live: VersionRecord, swap: Swap) -> None:
        async with self._swapping:
            if self._staged is None or self._staged.record != live or live.version <= self.version:
                return
            staging = self._staged.staging
            await swap(live.version, staging.tensors)
            self._spare, self._staged = staging, None
            self._member = replace(self._member, version=live.version)
            self._timeline = live.timeline
        await self._announce()
        _log.debug("serves new weights", member=self._member.id, version=live.version)

    async def _ask_if_left_behind(self, live: VersionRecord) -> None:
        on_its_way = self._offer is not None or (self._receiving is not None and not self._receiving.task.done())
        if self.version < live.version and not on_its_way:
            await self._hello()

    async def _hello(self) -> None:
        await post(self._board, TO_LEARNER, Hello(member=self._member.id))

    async def _announce(self) -> None:
        await self._board.announce(self._member, self._lease_s)

    def _reply_to(self, offer: Offer) -> _ReplyFields:
        return {"fence": offer.fence, "generation": offer.generation, "member": self._member.id}
