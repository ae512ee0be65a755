"""The workers' replies to the sender: the last reply of each member in the current attempt, and which members are gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from contextlib import suppress

from async_rl.board.inbox import Inbox
from async_rl.config import HEARTBEAT_S
from async_rl.protocols import Board
from async_rl.transport.messages import (
    PushFailed,
    PushStaged,
    Reply,
    ToLearner,
    WorkerHello,
    WorkerLeft,
)
from async_rl.transport.sending.membership import Membership
from async_rl.types import VersionRecord


class Replies:
    def __init__(self, board: Board, membership: Membership) -> None:
        self._board = board
        self._membership = membership
        self._attempt = (-1, -1)
        self._version = -1
        self._left: set[str] = set()
        self._lapsed: set[str] = set()
        """Members of the attempt whose listing expired."""
        self._changed = asyncio.Condition()
        self.last: dict[str, Reply] = {}
        """The last reply of each member in the attempt."""
        self.num_messages = 0

    def start_attempt(self, attempt: tuple[int, int], record: VersionRecord) -> None:
        """Start an attempt: replies to earlier ones are ignored from here on."""
        self._attempt, self._version = attempt, record.version
        self.last, self._lapsed = {}, set()

    async def wait_until(self, reached: Callable[[], bool], wait_s: float | None = None) -> None:
        """Wait until `reached()` holds, `wait_s` at most; it is checked at every message."""
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s), self._changed:
                await self._changed.wait_for(reached)

    def has_left(self, member: str) -> bool:
        return member in self._left

    def is_gone(self, member: str) -> bool:
        """Whether no reply will come: the member left, or its listing expired."""
        return member in self._left or member in self._lapsed

    def has_failed(self, member: str) -> bool:
        return isinstance(self.last.get(member), PushFailed)

    def all_answered(self, members: Collection[str]) -> bool:
        return all(member in self.last or self.is_gone(member) for member in members)

    def all_reported(self, members: Collection[str]) -> bool:
        return all(isinstance(self.last.get(member), PushStaged | PushFailed) or self.is_gone(member) for member in members)

    async def listen(self, inbox: Inbox[ToLearner]) -> None:
        """
        consumes: workers' messages        waits for:    a message
        produces: replies, wake-ups        unblocked by: any worker
        """
        while True:
            for message in await inbox.read():
                async with self._changed:
                    self._record(message)
                    self.num_messages += 1
                    self._changed.notify_all()

    async def watch_listing(self, members: Collection[str]) -> None:
        """
        consumes: the board's members      waits for:    a heartbeat interval
        produces: expired listings         unblocked by: the clock
        """
        while True:
            listed = {member.id for member in await self._board.members()}
            async with self._changed:
                self._lapsed = set(members) - listed
                self._changed.notify_all()
            await asyncio.sleep(HEARTBEAT_S)

    def _record(self, message: ToLearner) -> None:
        if isinstance(message, WorkerLeft):
            self._left.add(message.member)
            self._membership.mark_silent(message.member)
            return
        if isinstance(message, WorkerHello):
            self._left.discard(message.member)
            self._membership.mark_started(message.member)
            return
        self._membership.mark_spoke(message.member, failed_at=self._version if isinstance(message, PushFailed) else None)
        # The first failure has the cause; a later one only says that the attempt was cancelled.
        if message.attempt == self._attempt and not self.has_failed(message.member):
            self.last[message.member] = message
