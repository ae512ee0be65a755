"""The per-token inputs of a policy loss."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from learner.losses.segments import Segments


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tokens:
    """Log-probabilities and advantages, [T], 0 where not trained. Only `current` has a gradient."""

    current: Tensor
    behaviour: Tensor
    anchor: Tensor
    """Log-probabilities under the anchor: the behaviour or the proximal policy."""
    advantages: Tensor
    segments: Segments

    @property
    def now(self) -> Tensor:
        """Current log-probabilities, detached."""
        return self.current.detach()

    @property
    def moved(self) -> Tensor:
        """log rho = c - b, not clamped."""
        return self.now - self.behaviour
