"""Who needs weights: what the board lists, corrected by what this sender has seen of each member."""

from __future__ import annotations

from async_rl.protocols import Board


class Membership:
    """A member needs a version when it serves an older one, is not settled for it, and has shown that it is alive."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._settled: dict[str, int] = {}
        """The newest version that each member holds staged, or that was given up for it."""
        self._silent: set[str] = set()
        """Did not answer when it should have. Listed until their lease runs out, and worth no further timeout."""

    async def needy(self, version: int) -> list[str]:
        return [
            member.id
            for member in await self._board.members()
            if member.version < version and self._settled.get(member.id, -1) < version and member.id not in self._silent
        ]

    def settle(self, member: str, version: int) -> None:
        self._settled[member] = version

    def silent(self, member: str) -> None:
        self._silent.add(member)

    def hello(self, member: str) -> None:
        """It started (perhaps again, under the same id), or missed a version: it holds nothing of what we sent."""
        self._settled.pop(member, None)
        self._silent.discard(member)

    def alive(self, member: str) -> None:
        """It said something. One that was silent until now may try again."""
        if member in self._silent:
            self.hello(member)
