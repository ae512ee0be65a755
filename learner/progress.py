"""The learner's position: step, version, timeline."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """`version` is the number of the weights after `step` steps."""

    step: int
    version: int
    timeline: str
