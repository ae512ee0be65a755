"""Decides which versions are pushed. Pure.

Groups hold their slots until weights trained on them are live, so versions cannot be held back for ever: there are slots for
max_age + 1 steps, so at most that many steps can be trained from one push to the next. While a version is held back, workers
lack its steps' slots too: holding back k versions makes a run as asynchronous as one whose max_age is lower by k.
"""

from __future__ import annotations

from dataclasses import dataclass

from async_rl.config import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class PushPolicy:
    every_steps: int = 1
    """`wire.push_every_steps`."""
    every_s: float = 0.0
    """`wire.push_every_s`."""
    max_steps: int = 1
    """Steps from one push to the next that the age bound allows."""

    @staticmethod
    def of(config: Config) -> PushPolicy:
        return PushPolicy(
            every_steps=config.wire.push_every_steps,
            every_s=config.wire.push_every_s,
            max_steps=config.limits.steps_between_pushes,
        )

    def is_due(self, *, steps: int, seconds: float) -> bool:
        """`steps`, `seconds`: since the last version that was offered for a push."""
        return steps >= self.max_steps or (steps >= self.every_steps and seconds >= self.every_s)
