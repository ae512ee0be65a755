"""Apply the guard's decisions: scale the learning rate, lower the buffer's max_age, or end the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Protocol

import structlog
from pydantic import TypeAdapter

from async_rl.config.learner import GuardConfig
from async_rl.errors import Diverged
from async_rl.replay_protocol import ReplayBuffer
from learner.guard.rule import GuardRule, GuardState
from learner.step import StepResult

log = structlog.get_logger()

STATE = TypeAdapter(GuardState)


class GuardedRanks(Protocol):
    learning_rate_scale: float
    """Factor on the schedule's learning rate, from the next step on."""
    extra_state: dict[str, Any]
    """Extra state that is saved with every checkpoint, as loaded from the checkpoint the run resumed from."""


class TrainingGuard:
    def __init__(self, config: GuardConfig, *, max_age: float, buffer: ReplayBuffer, fence: int, ranks: GuardedRanks):
        kept = ranks.extra_state.get("guard", {}).get(config.action)  # state of another action does not apply to this one
        state = STATE.validate_python(kept) if kept is not None else GuardState()
        self._guard = GuardRule(config=config, configured_max_age=max_age, state=state)
        self._buffer, self._fence, self._ranks = buffer, fence, ranks

    async def begin(self) -> None:
        """Apply the state that a resumed run had reached."""
        if self._guard.max_age != self._guard.configured_max_age:
            await self._set_max_age()
        self._apply()

    async def after(self, result: StepResult, *, waited: float) -> None:
        """Check the metrics of a step and act on them. Raises Diverged if the action is `stop`."""
        if result.skipped:
            return
        before = self._guard.max_age
        self._guard, done = self._guard.after(result.metrics, waited=waited)
        self._apply()
        if done and self._guard.config.action == "stop":
            raise Diverged(done)
        if done:
            log.warning(done)
        if self._guard.max_age != before:
            await self._set_max_age()

    def row(self) -> Mapping[str, float]:
        return {"guard/notches": float(self._guard.state.notches)} if self._guard.config.action != "off" else {}

    async def _set_max_age(self) -> None:
        await self._buffer.set_limit(self._fence, "max_age", self._guard.max_age)

    def _apply(self) -> None:
        self._ranks.learning_rate_scale = self._guard.learning_rate_scale
        self._ranks.extra_state["guard"] = {self._guard.config.action: asdict(self._guard.state)}
