"""Apply the pace that the controller decides: tell the buffer after every step how many groups may be on their way."""

from __future__ import annotations

from collections.abc import Mapping

from async_rl.config import Config
from async_rl.replay_protocol import BufferStats, ReplayBuffer
from learner.pace.controller import LOWEST, STEPS_BEFORE_PAUSE, WINDOW, PaceController, PaceObservation


class Pacer:
    """Sets the pace if `staleness.pace` is `auto`. A fixed pace is one of the limits that the learner acquired the run with."""

    def __init__(self, config: Config, *, buffer: ReplayBuffer, fence: int) -> None:
        groups_per_step = config.batch.groups_per_step
        lowest = max(LOWEST, config.wire.push_every_steps + 1, config.replay.min_groups / groups_per_step)
        self._controller = PaceController(groups_per_step=groups_per_step, lowest=lowest)
        self._evaluated_every = config.evaluation.every
        self._waits_for_stragglers = config.staleness.selector == "windowed_fifo" and not config.limits.quotas
        self._is_auto = config.staleness.pace == "auto"
        self._most = config.staleness.max_age + 1
        self._buffer, self._fence = buffer, fence

    async def begin(self) -> None:
        """Begin with the lowest pace: the first steps show how much more is needed."""
        await self._apply()

    async def after(self, stats: BufferStats, *, step: int, unreleased_steps: int, waits: bool) -> Mapping[str, float]:
        """Decide anew after `step`. Returns the slots until then and the inputs of the decision, from which it can be replayed.

        `unreleased_steps`: those trained whose slots have not returned. `waits`: the next batch could not be taken yet.
        """
        groups_per_step = self._controller.groups_per_step
        seen = PaceObservation(
            reserved=stats.reserved,
            unreleased=unreleased_steps * groups_per_step,
            held_back=self._waits_for_stragglers and waits and stats.ready + stats.again >= groups_per_step,
            pause_ahead=self._is_evaluation_ahead(step),
        )
        self._controller = self._controller.after(seen)
        await self._apply()
        return {
            "pace/target": stats.slots / groups_per_step,
            "pace/slots": float(stats.slots),
            "pace/reserved": float(seen.reserved),
            "pace/unreleased": float(seen.unreleased),
            "pace/held_back": float(seen.held_back),
            "pace/pause_ahead": float(seen.pause_ahead),
        }

    async def make_room(self) -> None:
        """Allow every slot until the next step, because the learner waits and no group is on its way: those that hold the slots
        do not fit its batch (`max_share`).
        """
        await self._set(self._most)

    def _is_evaluation_ahead(self, step: int) -> bool:
        every = self._evaluated_every
        return every > WINDOW and step % every >= every - STEPS_BEFORE_PAUSE  # more often, and the pace would stay raised

    async def _apply(self) -> None:
        await self._set(self._controller.pace)

    async def _set(self, pace: float) -> None:
        if self._is_auto:
            await self._buffer.set_limit(self._fence, "pace", pace)
