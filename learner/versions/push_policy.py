"""Which versions are pushed. Pure.

Groups hold their slots until weights trained on them are live, so versions cannot be held back for ever: with the slots of
max_age + 1 steps, so many steps can be trained from one push to the next, and then nothing is left to train on. As long as a
version is held back its steps' slots are missed by workers too: holding back k versions leaves a run as asynchronous as one
whose max_age is lower by k.
"""

from __future__ import annotations

from dataclasses import dataclass

from async_rl.config import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class PushPolicy:
    every_steps: int = 1
    every_s: float = 0.0
    most_steps: int = 1
    """From one push to the next."""

    @staticmethod
    def of(config: Config) -> PushPolicy:
        return PushPolicy(
            every_steps=config.wire.push_every_steps,
            every_s=config.wire.push_every_s,
            most_steps=config.limits.steps_between_pushes,
        )

    def is_due(self, *, steps: int, seconds: float) -> bool:
        """Both since the last version that was handed over to be pushed."""
        return steps >= self.most_steps or (steps >= self.every_steps and seconds >= self.every_s)
