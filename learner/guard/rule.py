"""Keeps training near its own rollouts: a notch tighter after a while too far away, one back after a longer one near.

Pure: what a step reported goes in; the guard as it is from now on comes out, with a sentence where it acted.

    outside of the band    `patience` steps in a row    one notch tighter
    well inside of it      `recovery` steps in a row    one notch back
    between the two        both counts begin again
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from async_rl.config.learner import GuardConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardState:
    """What a checkpoint keeps."""

    notches: int = 0
    """How far from what is configured."""
    outside: int = 0
    inside: int = 0
    """Steps in a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardVerdict:
    """For people; and whether the run must end, which is then the reason."""

    sentence: str
    stop: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardRule:
    config: GuardConfig
    configured_max_age: float
    state: GuardState = GuardState()

    @property
    def learning_rate_scale(self) -> float:
        """What the schedule's learning rate is multiplied with."""
        if self.config.action != "lower_learning_rate":
            return 1.0
        return max(self.config.factor**self.state.notches, self.config.lowest_scale)

    @property
    def max_age(self) -> float:
        if self.config.action != "tighten_max_age":
            return self.configured_max_age
        lowest = min(self.config.lowest_max_age, self.configured_max_age)
        return max(self.configured_max_age - self.state.notches, lowest)

    def after(self, metrics: Mapping[str, float]) -> tuple[GuardRule, GuardVerdict | None]:
        """Of a step that changed the weights."""
        if self.config.action == "off" or metrics["policy/tokens"] == 0:
            return self, None
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
        return replace(self, state=state), None

    def _broken(self, ess: float, kl: float, *, margin: float) -> list[str]:
        """Which bounds do not hold, `margin` inside of the band's edges. What is not a number breaks them."""
        broken: list[str] = []
        if (least := self.config.min_ess) is not None and not ess >= least + margin * (1 - least):
            broken.append(f"policy/ess {ess:.3g} is below learner.guard.min_ess {least:g}")
        if (most := self.config.max_kl) is not None and not kl <= most * (1 - margin):
            broken.append(f"policy/kl_behave {kl:.3g} is above learner.guard.max_kl {most:g}")
        return broken

    def _tightened(self, why: str) -> tuple[GuardRule, GuardVerdict | None]:
        said = f"{why}, for {self.config.patience} steps in a row"
        if self.config.action == "stop":
            return self, GuardVerdict(sentence=f"{said}; lower learner.optimizer.learning_rate or staleness.max_age", stop=True)
        tighter = replace(self, state=GuardState(notches=self.state.notches + 1))
        if tighter._setting == self._setting:  # as tight as it gets: one notch more would only have to be undone
            return replace(self, state=GuardState(notches=self.state.notches)), None
        return tighter, GuardVerdict(sentence=f"{said}: {tighter._setting}")

    def _relaxed(self) -> tuple[GuardRule, GuardVerdict | None]:
        looser = replace(self, state=GuardState(notches=self.state.notches - 1))
        return looser, GuardVerdict(sentence=f"inside learner.guard's band for {self.config.recovery} steps: {looser._setting}")

    @property
    def _setting(self) -> str:
        if self.config.action == "tighten_max_age":
            return f"max_age is now {self.max_age:g}"
        return f"the learning rate is now multiplied by {self.learning_rate_scale:g}"
