"""Decide when to tighten or relax the learning rate or max_age. Pure: the metrics of a step go in; the next state of the guard
comes out, with a sentence if it acted.

    outside the band           `patience` steps in a row    tighter: learning rate x `factor`, or half of max_age
    inside it by `margin`      `recovery` steps             one notch looser: learning rate / `factor`, or max_age + 1
    in between                 both counts restart

max_age is the slow loop around the pace: it is judged by the oldest tokens, the first that a lower bound excludes, and raised
only for a learner that waits for groups, because a higher bound buys nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil

from async_rl.config.learner import GuardConfig

STARVES = 0.05
"""The learner starves in a step if it waits for groups for more than this share of the time."""
LEAST_SHARE = 0.05
"""Tokens of an age are judged if they are at least this share of the step's: a few say little."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardState:
    """The guard's state, as stored in checkpoints."""

    notches: int = 0
    """How far the setting is tightened: exponent of `factor` for the learning rate, versions for max_age."""
    outside: int = 0
    inside: int = 0
    """Steps well inside the band, without one in between that was not; for max_age only those in which the learner starved."""


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
        return max(self.configured_max_age - self.state.notches, self._lowest_max_age)

    @property
    def _lowest_max_age(self) -> float:
        return min(self.config.lowest_max_age, self.configured_max_age)

    def after(self, metrics: Mapping[str, float], *, waited: float) -> tuple[GuardRule, str]:
        """Return the guard after a step that changed the weights, and a sentence about what it did; empty if nothing.

        `waited`: share of the step's time in which the learner waited for groups.
        """
        if self.config.action == "off" or metrics["policy/tokens"] == 0:
            return self, ""
        is_slow_loop = self.config.action == "tighten_max_age"
        judged = _oldest_tokens(metrics) if is_slow_loop else "policy"
        outside = self._broken(metrics, judged, margin=0.0)
        is_comfortable = not self._broken(metrics, judged, margin=self.config.margin)
        counts = waited > STARVES or not is_slow_loop
        state = replace(
            self.state,
            outside=self.state.outside + 1 if outside else 0,
            inside=self.state.inside + counts if is_comfortable else 0,
        )
        if state.outside >= self.config.patience:
            return self._tightened(", ".join(outside))
        if state.inside >= self.config.recovery and state.notches > 0:
            return self._relaxed()
        return replace(self, state=state), ""

    def _broken(self, metrics: Mapping[str, float], judged: str, *, margin: float) -> list[str]:
        """Return a sentence for each violated bound, with the band narrowed by `margin`. NaN violates every bound."""
        broken: list[str] = []
        ess, kl = metrics[f"{judged}/ess"], metrics[f"{judged}/kl_behave"]
        if (least := self.config.min_ess) is not None and not ess >= least + margin * (1 - least):
            broken.append(f"{judged}/ess {ess:.3g} is below learner.guard.min_ess {least:g}")
        if (most := self.config.max_kl) is not None and not kl <= most * (1 - margin):
            broken.append(f"{judged}/kl_behave {kl:.3g} is above learner.guard.max_kl {most:g}")
        return broken

    def _tightened(self, why: str) -> tuple[GuardRule, str]:
        reason = f"{why}, for {self.config.patience} steps in a row"
        if self.config.action == "stop":
            return self, f"{reason}; lower learner.optimizer.learning_rate or staleness.max_age"
        tighter = replace(self, state=GuardState(notches=self._tighter_notches))
        if tighter._setting == self._setting:  # already at the limit: one notch more would only have to be undone
            return replace(self, state=GuardState(notches=self.state.notches)), ""
        return tighter, f"{reason}: {tighter._setting}"

    @property
    def _tighter_notches(self) -> int:
        if self.config.action != "tighten_max_age":
            return self.state.notches + 1
        most = ceil(self.configured_max_age - self._lowest_max_age)
        return min(self.state.notches + ceil(self.max_age / 2), most)

    def _relaxed(self) -> tuple[GuardRule, str]:
        looser = replace(self, state=GuardState(notches=self.state.notches - 1))
        return looser, f"inside the band of learner.guard for {self.config.recovery} steps: {looser._setting}"

    @property
    def _setting(self) -> str:
        if self.config.action == "tighten_max_age":
            return f"max_age is now {self.max_age:g}"
        return f"the learning rate is now multiplied by {self.learning_rate_scale:g}"


def _oldest_tokens(metrics: Mapping[str, float]) -> str:
    """Return the prefix of the metrics of the oldest tokens; that of all tokens if ages are not measured."""
    ages = [name.removesuffix("/tokens") for name in metrics if name.startswith("policy/age_") and name.endswith("/tokens")]
    enough = LEAST_SHARE * metrics["policy/tokens"]
    return max((age for age in ages if metrics[f"{age}/tokens"] >= enough), default="policy")  # 0, 1, 2_3, 4_7, 8_up
