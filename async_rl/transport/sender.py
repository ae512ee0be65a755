"""The learner's end of the weight wire.

push:  offer ─▶ everybody ready? ─▶ begin ─▶ delivery ─▶ everybody staged? ──yes──▶ report
         ▲                                                     │ no
         └───────── the survivors, fresh groups ◀── cancel ◀───┘   who stays silent is dropped
flip:  the version is live, serve it
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from threading import Event
from types import TracebackType

import structlog
import torch

from async_rl.config import HEARTBEAT_S, WireConfig
from async_rl.errors import WireError
from async_rl.protocols import Board
from async_rl.supervision.daemon_thread import in_daemon_thread
from async_rl.transport.cohorts import Cohorts
from async_rl.transport.depot import Depot, Errand
from async_rl.transport.gpus import backend_among, gpu_of
from async_rl.transport.link import Timeouts
from async_rl.transport.membership import Membership
from async_rl.transport.messages import (
    TO_LEARNER,
    TO_LEARNER_MESSAGES,
    TO_WORKERS,
    Backend,
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
    Reply,
    Staged,
    ToLearner,
    post,
)
from async_rl.types import VersionRecord

_GRACE_S = 1.0
"""A living event loop answers a Cancel in milliseconds, however busy its threads are."""

_MAX_FAILURES = 3
"""A member that answers but fails this often in one push is given up until it says hello again."""

_RECHECK_S = 5.0
"""How long `needed` trusts that every member in need has said so."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PushReport:
    staged: tuple[str, ...]
    """Hold the version, verified, and serve it from the flip on."""
    dropped: Mapping[str, str]
    """Member id -> why it did not get the version."""
    num_bytes: int
    """Of one copy of the weights."""
    seconds: float


class WeightSender:
    """Hold it open with `async with` for as long as the learner lives. Pushes run one at a time."""

    def __init__(self, board: Board, wire: WireConfig, depot: Depot, device: str, *, fence: int) -> None:
        """`depot` is rank 0's."""
        self._board = board
        self._wire = wire
        self._depot = depot
        self._device = torch.device(device)
        self._fence = fence
        self._timeouts = Timeouts(rendezvous_s=wire.rendezvous_timeout_s, operation_s=wire.operation_timeout_s)
        self._membership = Membership(board)
        self._generation = 0
        self._cohorts = Cohorts(fence)
        self._replies: dict[str, Reply] = {}
        """The last word of each member in the current attempt."""
        self._left: set[str] = set()
        """Members that said goodbye: a push that has counted on them need not run into its timeouts."""
        self._news = asyncio.Condition()
        self._num_heard = 0
        self._pushing = asyncio.Lock()
        self._listening = asyncio.TaskGroup()

    async def __aenter__(self) -> WeightSender:
        inbox = await Inbox.open(self._board, TO_LEARNER, TO_LEARNER_MESSAGES)
        await self._listening.__aenter__()
        self._listener = self._listening.create_task(self._listen(inbox), name="weight-replies")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.cancel()
        await self._listening.__aexit__(kind, error, trace)

    async def needy(self, version: int) -> list[str]:
        """The live members that need `version`."""
        return await self._membership.needy(version)

    async def needed(self, version: int) -> list[str]:
        """Wait until a live member needs `version`: it joined, came back, or missed it."""
        while True:
            heard = self._num_heard
            if needy := await self.needy(version):
                return needy
            await self._until(lambda heard=heard: self._num_heard != heard, _RECHECK_S)

    async def push(self, record: VersionRecord) -> PushReport:
        """Bring a version to every live member that needs it; return when each has it staged or was dropped.

        The depot has packed it, and `record.digest` is what the depot says. Repeating it serves whoever needs the version
        by then. A member's failure is in the report, never raised.
        """
        async with self._pushing:
            started = time.monotonic()
            staged: list[str] = []
            dropped: dict[str, str] = {}
            failures: Counter[str] = Counter()
            cohorts = [await self.needy(record.version)]
            while cohorts:
                if not (cohort := cohorts.pop(0)):
                    continue
                outcome = await self._attempt(record, cohort)
                staged += outcome.staged
                dropped |= outcome.dropped
                failed = list(outcome.failed)
                if len(cohort) > 1:
                    # Whoever was lost explains why the others failed. If nobody was, one broke it for all: halves tell who.
                    middle = 0 if outcome.dropped else len(failed) // 2
                    cohorts += [failed[:middle], failed[middle:]]
                    continue
                failures.update(failed)
                if failures[cohort[0]] < _MAX_FAILURES:
                    cohorts.append(failed)
                else:
                    dropped |= outcome.failed
            for member in (*staged, *dropped):
                self._membership.settle(member, record.version)
            for member, reason in dropped.items():
                tell = _log.info if member in self._left else _log.warning
                tell("left out of a weight push", member=member, version=record.version, reason=reason)
            return PushReport(
                staged=tuple(staged),
                dropped=dropped,
                num_bytes=self._depot.layout.num_bytes,
                seconds=time.monotonic() - started,
            )

    async def flip(self, record: VersionRecord) -> None:
        """Tell everybody that the version is live. Call it after `buffer.publish`; repeating it is harmless."""
        await post(self._board, TO_WORKERS, Flip(fence=self._fence, record=record))

    async def _attempt(self, record: VersionRecord, cohort: Sequence[str]) -> _Outcome:
        self._generation += 1
        self._replies = {}
        outcome = _Outcome(staged=[], dropped={}, failed={})
        if ready := await self._gather(record, cohort, outcome):
            released = Event()
            try:
                await self._deliver(record, ready, released)
            finally:
                released.set()
            await self._settle_accounts(list(ready), outcome)
            if outcome.dropped or outcome.failed:
                self._cohorts.broke()
        return outcome

    async def _gather(self, record: VersionRecord, cohort: Sequence[str], outcome: _Outcome) -> dict[str, Ready]:
        """Offer the version, and return who is ready for it."""
        offer = Offer(
            fence=self._fence,
            generation=self._generation,
            to=tuple(cohort),
            record=record,
            host=self._depot.meeting.host,
            port=self._depot.meeting.port,
            layout=self._depot.layout.digest,
        )
        await post(self._board, TO_WORKERS, offer)
        await self._until(lambda: self._replies.keys() | self._left >= set(cohort), self._timeouts.operation_s)
        ready: dict[str, Ready] = {}
        for member in cohort:
            match self._replies.get(member):
                case Ready() as reply:
                    ready[member] = reply
                case Refused(reason=reason):
                    outcome.dropped[member] = reason
                case Failed(reason=reason):
                    outcome.failed[member] = reason
                case _ if member in self._left:
                    outcome.dropped[member] = "left the run"
                case _:
                    self._lose(member, f"did not answer the offer within {self._timeouts.operation_s:g} s", outcome)
        return ready

    async def _deliver(self, record: VersionRecord, ready: Mapping[str, Ready], released: Event) -> None:
        """Send, and wait for everybody's report; give up at the first sign that something is broken."""
        members = list(ready)
        backend = await self._backend_for(members)
        wires = self._cohorts.wires(len(self._depot.layout.parcels), ready, backend)
        begin = Begin(
            fence=self._fence,
            generation=self._generation,
            members=tuple(members),
            wires=wires,
            backend=backend,
            transfer_bytes=int(self._wire.bucket_mb * (1 << 20)),
        )
        await post(self._board, TO_WORKERS, begin)
        errands = [
            Errand(parcel=wire.parcel, version=record.version, group=wire.group, size=len(wire.members) + 1, backend=backend)
            for wire in wires
        ]
        try:
            async with asyncio.TaskGroup() as both:
                watch = both.create_task(self._until_broken(members), name="weight-push-watch")
                if errands:
                    await in_daemon_thread(lambda: self._depot.deliver(errands, released), name="weight-delivery")
                # Everybody has everything; what is left is their verdict on the digests.
                await self._until(lambda: self._reported(members), self._timeouts.operation_s)
                watch.cancel()
        except* WireError as broken:
            _log.info("a weight push broke", generation=self._generation, reason=str(broken.exceptions[0]))

    async def _backend_for(self, cohort: Sequence[str]) -> Backend:
        members = await self._board.members()
        return backend_among([gpu_of(self._device), *(member.gpu for member in members if member.id in cohort)])

    async def _settle_accounts(self, ready: Sequence[str], outcome: _Outcome) -> None:
        if not self._reported(ready):
            await post(self._board, TO_WORKERS, Cancel(fence=self._fence, generation=self._generation))
            await self._until(lambda: self._reported(ready), _GRACE_S)
        for member in ready:
            match self._replies.get(member):
                case Staged():
                    outcome.staged.append(member)
                case Failed(reason=reason):
                    outcome.failed[member] = reason
                case _:
                    self._lose(member, "died or hung while receiving", outcome)

    def _lose(self, member: str, reason: str, outcome: _Outcome) -> None:
        self._membership.silent(member)
        outcome.dropped[member] = reason

    def _reported(self, members: Sequence[str]) -> bool:
        return all(isinstance(self._replies.get(member), Staged | Failed) for member in members)

    async def _until_broken(self, ready: Sequence[str]) -> None:
        while not self._has_failure():
            listed = {member.id for member in await self._board.members()} - self._left
            if gone := set(ready) - listed:
                raise WireError(f"{', '.join(sorted(gone))} left the run")
            await self._until(lambda: self._has_failure() or not self._left.isdisjoint(ready), HEARTBEAT_S)
        raise WireError("a member reported a failure")

    def _has_failure(self) -> bool:
        return any(isinstance(reply, Failed) for reply in self._replies.values())

    async def _until(self, reached: Callable[[], bool], wait_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s), self._news:
                await self._news.wait_for(reached)

    async def _listen(self, inbox: Inbox[ToLearner]) -> None:
        """consumes: what members say     produces: news, for whoever waits on it     unblocked by: any message"""
        while True:
            for message in await inbox.read():
                async with self._news:
                    self._hear(message)
                    self._num_heard += 1
                    self._news.notify_all()

    def _hear(self, message: ToLearner) -> None:
        if isinstance(message, Left):
            self._left.add(message.member)
            self._membership.silent(message.member)
            return
        if isinstance(message, Hello):
            self._left.discard(message.member)
            self._membership.hello(message.member)
            return
        self._membership.alive(message.member)
        # The first failure says why; a later one only that the attempt was called off.
        has_failed = isinstance(self._replies.get(message.member), Failed)
        if message.attempt == (self._fence, self._generation) and not has_failed:
            self._replies[message.member] = message


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """How one attempt ended, for each member of its cohort."""

    staged: list[str]
    dropped: dict[str, str]
    failed: dict[str, str]
    """Alive, may try again."""
