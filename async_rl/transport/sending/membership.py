"""Which workers need weights: those that the board lists, corrected by what this sender has seen of each member."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, replace

from async_rl.protocols import Board, Member


@dataclass(frozen=True, slots=True, kw_only=True)
class _FailureRecord:
    """A member that replies, but failed to receive a version that others received."""

    version: int
    failures: int
    """Consecutive ones."""
    not_before: float
    is_excluded: bool = True
    """Not sent to, until it asks for weights, or has fetched that version some other way."""


class Membership:
    """A member needs a version when it serves an older one, has no result for this one yet, and is expected to reply."""

    def __init__(self, board: Board, *, rest_s: float) -> None:
        """`rest_s`: pause after two consecutive failures of a member; each further failure adds as much."""
        self._board = board
        self._rest_s = rest_s
        self._gpus: dict[str, tuple[str, ...]] = {}
        """GPUs of each member, from the last call of `members_behind`."""
        self._settled: dict[str, int] = {}
        """The newest version that each member has staged, or that was given up for it."""
        self._silent: set[str] = set()
        """Members that did not reply in time. They stay listed until their lease expires, but no push waits for them again."""
        self._failures: dict[str, _FailureRecord] = {}

    async def members_behind(self, version: int) -> list[str]:
        members = await self._board.members()
        self._gpus = {member.id: member.gpus for member in members}
        return [
            member.id
            for member in members
            if member.version < version
            and not member.catches_up
            and self._settled.get(member.id, -1) < version
            and member.id not in self._silent
            and not self._is_excluded(member)
        ]

    def gpus_of(self, members: Collection[str]) -> list[str]:
        """GPUs that receive weights; "" for a member without any."""
        return [gpu for member in members for gpu in self._gpus.get(member) or ("",)]

    def is_trusted(self, member: str) -> bool:
        """Whether to wait the full timeout for its reply; a member that failed last time gets a short one."""
        return member not in self._failures

    def mark_staged(self, member: str, version: int) -> None:
        self._settled[member] = version
        self._failures.pop(member, None)

    def mark_given_up(self, member: str, version: int) -> None:
        self._settled[member] = version

    def mark_silent(self, member: str) -> None:
        self._silent.add(member)

    def mark_failed(self, member: str, version: int, *, is_cut_off: bool = False) -> None:
        """`is_cut_off`: it does not reach the learner, so it pauses after its first failure already."""
        self._silent.discard(member)
        before = self._failures.get(member)
        failures = before.failures + 1 if before is not None else 1
        rest_s = self._rest_s * (failures if is_cut_off else failures - 1)
        self._failures[member] = _FailureRecord(version=version, failures=failures, not_before=time.monotonic() + rest_s)

    def mark_started(self, member: str) -> None:
        """The member started (perhaps again, under the same id) or missed a version: forget what was sent to it."""
        self._settled.pop(member, None)
        self._silent.discard(member)
        suspicion = self._failures.get(member)
        if suspicion is not None and time.monotonic() >= suspicion.not_before:
            self._failures[member] = replace(suspicion, is_excluded=False)

    def mark_spoke(self, member: str, *, failed_at: int | None) -> None:
        """A silent member replied: send to it again, unless the reply was a failure (of version `failed_at`)."""
        if member not in self._silent:
            return
        if failed_at is None:
            self.mark_started(member)
        else:
            self.mark_failed(member, failed_at)

    def _is_excluded(self, member: Member) -> bool:
        suspicion = self._failures.get(member.id)
        if suspicion is None or not suspicion.is_excluded:
            return False
        return member.version < suspicion.version or time.monotonic() < suspicion.not_before
