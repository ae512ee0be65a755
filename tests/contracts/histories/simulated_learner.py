"""The learner of learner/loop.py without weights: it prefetches, trains, issues, publishes, releases, saves, checkpoints.

When its lease or the server's data are lost, it starts again from its newest checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Coroutine
from dataclasses import asdict
from typing import Any

from pydantic import TypeAdapter

from async_rl.config import Config
from async_rl.errors import FenceLost, ServerRewound
from async_rl.replay_protocol import Limits
from async_rl.types import BufferPosition, TakenGroup, VersionRecord
from tests.contracts.histories.promises import Spectator
from tests.contracts.histories.stages import Stage

AHEAD = 2
"""Limit of batches that it holds: one in training, one prefetched."""
BEGINNING = ("acquire", "recover", "issue", "publish")
"""Calls between which it may die."""


class Interrupted(Exception):
    """The buffer reports that the learner must start again."""


class SimulatedLearner:
    def __init__(self, stage: Stage, config: Config, spectator: Spectator) -> None:
        self._stage, self._buffer, self._config, self._spectator = stage, stage.buffer, config, spectator
        self._in_force = config.limits
        self.fence = 0
        self.old_fences: list[int] = []
        self.position: BufferPosition | None = None
        """The position of the newest durable checkpoint."""
        self.server_lost_changes = False
        self.step, self.version, self._meals, self._offered = 0, -1, list[int](), None
        self._live_step = self._released = self._told = 0

    @property
    def limits(self) -> Limits:
        return self._stage.limits(self._in_force)

    def hears_of(self, limits: Limits) -> None:
        """Change the limits during the run; the learner's own configuration stays as it is."""
        self._in_force = limits

    # -- start of a life --------------------------------------------------------------------------------------------
    def start(self, *, dies_after: str = "") -> None:
        self._stage.pass_time(1)  # past the previous learner's lease
        if self.fence:
            self.old_fences.append(self.fence)
        fence = self._stage.do(self._buffer.acquire("learner", self._config.limits, after=self.fence))
        assert fence > self.fence
        self.fence, self.server_lost_changes = fence, False
        self._go_back_to_checkpoint()
        for number, act in enumerate((self._recover, self._issue, self.go_live)):
            if dies_after == BEGINNING[number]:
                return
            act()

    def _go_back_to_checkpoint(self) -> None:
        self.step = self.position.step if self.position is not None else 0
        self._live_step = self._released = self._told = self.step
        self._meals, self._offered = [], None
        self._spectator.resumed(self.step)

    def _recover(self) -> None:
        recovery = self._ask(self._buffer.recover(self.fence, self.position))
        self.version = max(recovery.version, self._spectator.highest_version)

    def _issue(self) -> None:
        version = self._ask(self._buffer.issue(self.fence, after=self.version))
        assert self._ask(self._buffer.issue(self.fence, after=self.version)) == version
        self._spectator.issued(version)
        self.version = version
        self._offered = VersionRecord(version=version, timeline="t", step=self.step, digest="d")

    def _ask(self, call: Coroutine[Any, Any, Any]) -> Any:
        try:
            return self._stage.do(call)
        except (FenceLost, ServerRewound) as error:
            if not self.server_lost_changes:
                raise  # not expected here
            raise Interrupted from error

    # -- its steps --------------------------------------------------------------------------------------------------
    def take(self, *, patient: bool = True) -> bool:
        if len(self._meals) >= AHEAD:
            return False
        step, version = self.step + len(self._meals) + 1, self.version + len(self._meals)
        limits, max_tokens = self.limits, self._config.batch.tokens_per_step
        batch: list[TakenGroup] = self._ask(
            self._buffer.take(
                self.fence,
                step=step,
                version=version,
                num_groups=limits.groups_per_step,
                wait_s=0,
                max_tokens=max_tokens,
                patient=patient,
            )
        )
        if batch:
            self._spectator.took(step, version, batch, limits, max_tokens)
            self._meals.append(step)
        return bool(batch)

    def train(self) -> bool:
        if not self._meals:
            return False
        self.step = self._meals.pop(0)
        self._issue()
        return True

    def skip(self) -> None:
        """Skip a step that is not finite: it makes no version, so the prefetched batch is taken again for the same weights."""
        if self._meals:
            self.publish()
            self._ask(self._buffer.release(self.fence, self._meals[0]))
            self.step = self._released = self._live_step = self._meals[0]
            self._meals.clear()
            self._spectator.resumed(self.step)

    def go_live(self) -> None:
        if self._offered is not None:
            self._ask(self._buffer.publish(self.fence, self._offered))
            self._live_step, self._offered = self._offered.step, None

    def release(self) -> None:
        if self._live_step > self._released:
            self._ask(self._buffer.release(self.fence, self._live_step))
            self._released = self._live_step

    def publish(self) -> None:
        self.go_live()
        self.release()

    def save(self) -> None:
        """Save a durable checkpoint in a JSON file."""
        position = self._ask(self._buffer.position(self.fence, self.step))
        self.position = TypeAdapter(BufferPosition).validate_python(json.loads(json.dumps(asdict(position))))

    def checkpoint(self) -> None:
        if self.position is not None and self.position.step > self._told:
            self.publish()
            self._ask(self._buffer.checkpoint(self.fence, self.position.step))
            self._told = self.position.step

    def prioritize(self, weights: list[float]) -> None:
        groups = list(self._spectator.uses())[-4:]
        self._ask(self._buffer.prioritize(self.fence, dict(zip(groups, weights, strict=False))))

    def train_a_step(self) -> bool:
        if not self._meals and not self.take():
            return False
        self.train()
        self.publish()
        return True

    def train_all(self) -> None:
        while self.train():
            self.publish()
        self.publish()
