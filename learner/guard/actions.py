"""Acts on what the guard decides: the learning rate of the next steps, the buffer's max_age, the end of the run."""

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
    """What the schedule's learning rate is multiplied with from the next step on."""
    beside: dict[str, Any]
    """What its checkpoints carry for others, and the one it went on from has carried."""


class TrainingGuard:
    def __init__(self, config: GuardConfig, *, max_age: float, buffer: ReplayBuffer, fence: int, trainer: GuardedRanks):
        kept = trainer.beside.get("guard", {}).get(config.action)  # what another action has done is none of this one's
        state = STATE.validate_python(kept) if kept is not None else GuardState()
        self._guard = GuardRule(config=config, configured_max_age=max_age, state=state)
        self._buffer, self._fence, self._trainer = buffer, fence, trainer

    async def begin(self) -> None:
        """What this guard did in an earlier life holds again."""
        if self._guard.max_age != self._guard.configured_max_age:
            await self._buffer.set_max_age(self._fence, self._guard.max_age)
        self._tell_trainer()

    async def after(self, result: StepResult) -> None:
        if result.skipped:
            return
        before = self._guard.max_age
        self._guard, verdict = self._guard.after(result.metrics)
        self._tell_trainer()
        if verdict is not None:
            if verdict.stop:
                raise Diverged(verdict.sentence)
            log.warning(verdict.sentence)
        if self._guard.max_age != before:
            await self._buffer.set_max_age(self._fence, self._guard.max_age)

    def row(self) -> Mapping[str, float]:
        return {"guard/notches": float(self._guard.state.notches)} if self._guard.config.action != "off" else {}

    def _tell_trainer(self) -> None:
        self._trainer.learning_rate_scale = self._guard.learning_rate_scale
        self._trainer.beside["guard"] = {self._guard.config.action: asdict(self._guard.state)}
