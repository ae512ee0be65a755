"""What the supervisor of a round recorded; everything else is in the journals."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    role: str
    life: int
    how: str
    """kill | failpoint | server killed | exit and its code"""
    state: str
    """The state of the process, or the failpoint at which it died."""


@dataclass(slots=True, kw_only=True)
class Outcome:
    deaths: list[Death] = field(default_factory=list[Death])
    pauses: int = 0
    poisoned: int = 0
    set_backs: int = 0
    lives: dict[str, int] = field(default_factory=dict[str, int])
    recovery_s: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    """Role -> seconds from a death to the role's next act."""
    problems: list[str] = field(default_factory=list[str])
    acts: int = 0
    seconds: float = 0.0

    @property
    def kills(self) -> int:
        return sum(death.how in ("kill", "failpoint", "server killed") for death in self.deaths)

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "kills": self.kills}
