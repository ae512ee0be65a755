"""Apply the pace that the controller decides: tell the buffer after every step how many groups may be on their way."""

from __future__ import annotations

from collections.abc import Mapping

from async_rl.config import Config
from async_rl.replay_protocol import BufferStats, ReplayBuffer
from learner.pace.controller import LOWEST, PaceController, PaceObservation


class Pacer:
    """Sets the pace if `staleness.pace` is `auto`. A fixed pace is one of the limits that the learner acquired the run with."""

    def __init__(self, config: Config, *, buffer: ReplayBuffer, fence: int) -> None:
        groups_per_step = config.batch.groups_per_step
        lowest = max(LOWEST, config.wire.push_every_steps + 1, config.replay.min_groups / groups_per_step)
        self._controller = PaceController(groups_per_step=groups_per_step, lowest=lowest)
        self._is_auto = config.staleness.pace == "auto"
        self._most = config.staleness.max_age + 1
        self._buffer, self._fence = buffer, fence

    async def begin(self) -> None:
        """Begin with the lowest pace: the first steps show how much more is needed."""
        await self._apply()

    async def after(self, stats: BufferStats, *, unreleased_steps: int) -> Mapping[str, float]:
        """Decide anew after a step. Returns the slots until then and the inputs of the decision, from which it can be replayed.

        `unreleased_steps`: those trained whose slots have not returned.
        """
        groups_per_step = self._controller.groups_per_step
        seen = PaceObservation(reserved=stats.reserved, unreleased=unreleased_steps * groups_per_step)
        self._controller = self._controller.after(seen)
        await self._apply()
        return {
            "pace/target": stats.slots / groups_per_step,
            "pace/slots": float(stats.slots),
            "pace/reserved": float(seen.reserved),
            "pace/unreleased": float(seen.unreleased),
        }

    async def make_room(self) -> None:
        """Allow every slot until the next step, because the learner waits and no group is on its way: those that hold the slots
        do not fit its batch (`max_share`).
        """
        await self._set(self._most)

    async def _apply(self) -> None:
        await self._set(self._controller.pace)

    async def _set(self, pace: float) -> None:
        if self._is_auto:
            await self._buffer.set_limit(self._fence, "pace", pace)
