"""Who needs weights: what the board lists, corrected by what this sender has seen of each member."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, replace

from async_rl.protocols import Board, Member


@dataclass(frozen=True, slots=True, kw_only=True)
class _Suspicion:
    """Of a member that speaks, but did not take a version in when others could."""

    version: int
    failures: int
    """In a row."""
    not_before: float
    is_out: bool = True
    """Not counted on: until it asks for weights, or came by that version some other way."""


class Membership:
    """A member needs a version when it serves an older one, is not settled for it, and can be counted on."""

    def __init__(self, board: Board, *, rest_s: float) -> None:
        """`rest_s`: how long a member that failed twice in a row is left to itself; three times, twice as long."""
        self._board = board
        self._rest_s = rest_s
        self._gpus: dict[str, str] = {}
        """Of the members that were listed when somebody last asked who needs a version."""
        self._settled: dict[str, int] = {}
        """The newest version that each member holds staged, or that was given up for it."""
        self._silent: set[str] = set()
        """Did not answer when it should have. Listed until their lease runs out, and worth no further timeout."""
        self._suspects: dict[str, _Suspicion] = {}

    async def needy(self, version: int) -> list[str]:
        members = await self._board.members()
        self._gpus = {member.id: member.gpu for member in members}
        return [
            member.id
            for member in members
            if member.version < version
            and not member.catches_up
            and self._settled.get(member.id, -1) < version
            and member.id not in self._silent
            and not self._is_out(member)
        ]

    def gpus_of(self, members: Collection[str]) -> list[str]:
        return [self._gpus.get(member, "") for member in members]

    def is_trusted(self, member: str) -> bool:
        """Worth waiting for. Who failed last time must be quick."""
        return member not in self._suspects

    def staged(self, member: str, version: int) -> None:
        self._settled[member] = version
        self._suspects.pop(member, None)

    def given_up(self, member: str, version: int) -> None:
        self._settled[member] = version

    def silent(self, member: str) -> None:
        self._silent.add(member)

    def failed(self, member: str, version: int) -> None:
        self._silent.discard(member)
        before = self._suspects.get(member)
        failures = before.failures + 1 if before is not None else 1
        rest_s = self._rest_s * (failures - 1)
        self._suspects[member] = _Suspicion(version=version, failures=failures, not_before=time.monotonic() + rest_s)

    def hello(self, member: str) -> None:
        """It started (perhaps again, under the same id), or missed a version: it holds nothing of what we sent."""
        self._settled.pop(member, None)
        self._silent.discard(member)
        suspicion = self._suspects.get(member)
        if suspicion is not None and time.monotonic() >= suspicion.not_before:
            self._suspects[member] = replace(suspicion, is_out=False)

    def spoke(self, member: str, *, failed_at: int | None) -> None:
        """One that was silent until now may try again, unless all it says is that it could not keep up."""
        if member not in self._silent:
            return
        if failed_at is None:
            self.hello(member)
        else:
            self.failed(member, failed_at)

    def _is_out(self, member: Member) -> bool:
        suspicion = self._suspects.get(member.id)
        if suspicion is None or not suspicion.is_out:
            return False
        return member.version < suspicion.version or time.monotonic() < suspicion.not_before
