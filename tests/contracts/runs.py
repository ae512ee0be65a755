"""A run of the buffer under test, whatever stands behind it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from async_rl.protocols import Limits, ReplayBuffer
from async_rl.types import VersionRecord

LEARNER_LEASE_S = 1.0


class Run:
    """One run of the buffer under test, as several processes may open it."""

    def __init__(self, open_one: Callable[[str], Awaitable[ReplayBuffer]], name: str) -> None:
        self._open = open_one
        self.name = name

    async def open(self, suffix: str = "") -> ReplayBuffer:
        """A further client; another `suffix` is another run in the same server."""
        return await self._open(self.name + suffix)

    async def start(self, suffix: str = "", **changed: object) -> tuple[ReplayBuffer, int]:
        """A buffer whose learner has published version 0, and the learner's fence."""
        buffer = await self.open(suffix)
        fence = await buffer.acquire("learner", limits(**changed))
        await publish(buffer, fence)
        return buffer, fence


def limits(**changed: object) -> Limits:
    chosen = {"max_age": 2, "groups_per_step": 2, "lease_s": 60.0, "max_attempts": 2, "overtaken": "wait"} | changed
    return Limits(**chosen)  # pyright: ignore[reportArgumentType]


async def publish(buffer: ReplayBuffer, fence: int) -> int:
    version = await buffer.issue(fence)
    await buffer.publish(fence, VersionRecord(version=version, timeline="t", step=version, digest="d"))
    return version
