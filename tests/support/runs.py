"""A run of the buffer under test, in memory or on a server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from async_rl.replay_protocol import Limits, ReplayBuffer
from async_rl.types import BufferPosition, VersionRecord

LEARNER_LEASE_S = 1.0


class Run:
    """One run of the buffer under test, as several processes may open it."""

    def __init__(self, open_one: Callable[[str, float], Awaitable[ReplayBuffer]], name: str) -> None:
        """`open_one`: by the run's name and the seconds of a learner's lease."""
        self._open = open_one
        self.name = name

    async def open(self, suffix: str = "", *, learner_lease_s: float = LEARNER_LEASE_S) -> ReplayBuffer:
        """Open another client; another `suffix` is another run in the same server."""
        return await self._open(self.name + suffix, learner_lease_s)

    async def start(
        self, suffix: str = "", *, learner_lease_s: float = LEARNER_LEASE_S, **changed: object
    ) -> tuple[ReplayBuffer, int]:
        """Open a buffer whose learner has published version 0; returns it with the learner's fence."""
        buffer = await self.open(suffix, learner_lease_s=learner_lease_s)
        return buffer, await started(buffer, **changed)


def limits(**changed: object) -> Limits:
    chosen = {"max_age": 2, "groups_per_step": 2, "lease_s": 60.0, "max_attempts": 2} | changed
    return Limits(**chosen)  # pyright: ignore[reportArgumentType]


async def started(buffer: ReplayBuffer, position: BufferPosition | None = None, **changed: object) -> int:
    """Take over as a learner and publish a version; returns the fence."""
    fence = await buffer.acquire("learner", limits(**changed))
    recovery = await buffer.recover(fence, position)
    await publish(buffer, fence, after=recovery.version)
    return fence


async def publish(buffer: ReplayBuffer, fence: int, after: int | None = None) -> int:
    version = await buffer.issue(fence, after=after if after is not None else (await buffer.stats()).version)
    await buffer.publish(fence, VersionRecord(version=version, timeline="t", step=version, digest="d"))
    return version
