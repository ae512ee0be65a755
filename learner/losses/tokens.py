"""What a policy loss sees of its tokens."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from learner.losses.segments import Segments


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tokens:
    """Log-probabilities and advantages, [T], 0 wherever nothing is trained. Only `current` has a gradient."""

    current: Tensor
    behaviour: Tensor
    anchor: Tensor
    """The behaviour or the proximal policy: whose probability the ratio divides by."""
    advantages: Tensor
    segments: Segments

    @property
    def now(self) -> Tensor:
        return self.current.detach()

    @property
    def moved(self) -> Tensor:
        """log rho = c - b, as it is: not clamped."""
        return self.now - self.behaviour
