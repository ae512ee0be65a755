"""Decide when to tighten or relax: one notch tighter after `patience` bad steps, one notch looser after `recovery` good ones.

Pure: the metrics of a step go in; the next state of the guard comes out, with a sentence if it acted.

    outside the band           `patience` steps in a row    one notch tighter
    inside it by `margin`      `recovery` steps in a row    one notch looser
    in between                 both counts restart
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from async_rl.config.learner import GuardConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardState:
    """The guard's state, as stored in checkpoints."""

    notches: int = 0
    """How many times the setting was tightened and not relaxed since."""
    outside: int = 0
    inside: int = 0
    """Steps in a row inside the band."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardRule:
    config: GuardConfig
    configured_max_age: float
    state: GuardState = GuardState()

    @property
    def learning_rate_scale(self) -> float:
        """Factor on the schedule's learning rate."""
        if self.config.action != "lower_learning_rate":
            return 1.0
        return max(self.config.factor**self.state.notches, self.config.lowest_scale)

    @property
    def max_age(self) -> float:
        if self.config.action != "tighten_max_age":
            return self.configured_max_age
        lowest = min(self.config.lowest_max_age, self.configured_max_age)
        return max(self.configured_max_age - self.state.notches, lowest)

    def after(self, metrics: Mapping[str, float]) -> tuple[GuardRule, str]:
        """Return the guard after a step that changed the weights, and a sentence about what it did; empty if nothing."""
        if self.config.action == "off" or metrics["policy/tokens"] == 0:
            return self, ""
        ess, kl = metrics["policy/ess"], metrics["policy/kl_behave"]
        outside = self._broken(ess, kl, margin=0.0)
        inside = not self._broken(ess, kl, margin=self.config.margin)
        state = replace(
            self.state,
            outside=self.state.outside + 1 if outside else 0,
            inside=self.state.inside + 1 if inside else 0,
        )
        if state.outside >= self.config.patience:
            return self._tightened(", ".join(outside))
        if state.inside >= self.config.recovery and state.notches > 0:
            return self._relaxed()
        return replace(self, state=state), ""

    def _broken(self, ess: float, kl: float, *, margin: float) -> list[str]:
        """Return a sentence for each violated bound, with the band narrowed by `margin`. NaN violates every bound."""
        broken: list[str] = []
        if (least := self.config.min_ess) is not None and not ess >= least + margin * (1 - least):
            broken.append(f"policy/ess {ess:.3g} is below learner.guard.min_ess {least:g}")
        if (most := self.config.max_kl) is not None and not kl <= most * (1 - margin):
            broken.append(f"policy/kl_behave {kl:.3g} is above learner.guard.max_kl {most:g}")
        return broken

    def _tightened(self, why: str) -> tuple[GuardRule, str]:
        reason = f"{why}, for {self.config.patience} steps in a row"
        if self.config.action == "stop":
            return self, f"{reason}; lower learner.optimizer.learning_rate or staleness.max_age"
        tighter = replace(self, state=GuardState(notches=self.state.notches + 1))
        if tighter._setting == self._setting:  # already at the limit: one notch more would only have to be undone
            return replace(self, state=GuardState(notches=self.state.notches)), ""
        return tighter, f"{reason}: {tighter._setting}"

    def _relaxed(self) -> tuple[GuardRule, str]:
        looser = replace(self, state=GuardState(notches=self.state.notches - 1))
        return looser, f"inside the band of learner.guard for {self.config.recovery} steps: {looser._setting}"

    @property
    def _setting(self) -> str:
        if self.config.action == "tighten_max_age":
            return f"max_age is now {self.max_age:g}"
        return f"the learning rate is now multiplied by {self.learning_rate_scale:g}"
