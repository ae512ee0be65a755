"""What a learner hears of its workers: their last word in the attempt under way, and whose voice is gone."""

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
        """Members of the attempt that are not listed any more."""
        self._news = asyncio.Condition()
        self.replies: dict[str, Reply] = {}
        """The last word of each member in the attempt."""
        self.num_heard = 0

    def begin(self, attempt: tuple[int, int], record: VersionRecord) -> None:
        """From here on what belongs to an attempt before this one counts no more."""
        self._attempt, self._version = attempt, record.version
        self.replies, self._lapsed = {}, set()

    async def until(self, reached: Callable[[], bool], wait_s: float | None = None) -> None:
        """Or until the time is up."""
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s), self._news:
                await self._news.wait_for(reached)

    def said_goodbye(self, member: str) -> bool:
        return member in self._left

    def is_gone(self, member: str) -> bool:
        """There will be no answer: it left, or its listing ran out."""
        return member in self._left or member in self._lapsed

    def has_failed(self, member: str) -> bool:
        return isinstance(self.replies.get(member), PushFailed)

    def all_answered(self, members: Collection[str]) -> bool:
        return all(member in self.replies or self.is_gone(member) for member in members)

    def all_reported(self, members: Collection[str]) -> bool:
        return all(isinstance(self.replies.get(member), PushStaged | PushFailed) or self.is_gone(member) for member in members)

    async def listen(self, inbox: Inbox[ToLearner]) -> None:
        """consumes: what members say     produces: news, for whoever waits on it     unblocked by: any message"""
        while True:
            for message in await inbox.read():
                async with self._news:
                    self._hear(message)
                    self.num_heard += 1
                    self._news.notify_all()

    async def watch_listing(self, members: Collection[str]) -> None:
        """consumes: the list of members     produces: news of those that fell off it     unblocked by: a heartbeat"""
        while True:
            listed = {member.id for member in await self._board.members()}
            async with self._news:
                self._lapsed = set(members) - listed
                self._news.notify_all()
            await asyncio.sleep(HEARTBEAT_S)

    def _hear(self, message: ToLearner) -> None:
        if isinstance(message, WorkerLeft):
            self._left.add(message.member)
            self._membership.silent(message.member)
            return
        if isinstance(message, WorkerHello):
            self._left.discard(message.member)
            self._membership.hello(message.member)
            return
        self._membership.spoke(message.member, failed_at=self._version if isinstance(message, PushFailed) else None)
        # The first failure says why; a later one only that the attempt was called off.
        if message.attempt == self._attempt and not self.has_failed(message.member):
            self.replies[message.member] = message
