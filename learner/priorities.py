"""Priorities of groups that may be trained again (staleness.selector: prioritized, replay.max_uses above 1)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import cast

from async_rl.errors import ConfigError
from async_rl.imports.references import load_reference
from async_rl.types import TakenGroup
from learner.prefetch import StepBatch

Priority = Callable[[TakenGroup, float], float]
"""(group, mean |advantage| of its rollouts) -> weight. A group that was not trained yet has weight 1."""

LEAST = 1e-3
"""Lower bound of a weight: every group in the buffer can still be drawn."""


def by_advantage(_taken: TakenGroup, advantage: float) -> float:
    return advantage


def by_age(taken: TakenGroup, _advantage: float) -> float:
    return 1 / (1 + taken.age)


def load_priority(name: str) -> Priority:
    """Load the function that `replay.priority` names. Raises ConfigError."""
    known: dict[str, Priority] = {"advantage": by_advantage, "age": by_age}
    if name in known:
        return known[name]
    if ":" not in name:
        raise ConfigError(
            f"replay.priority: {name!r} is unknown; choose advantage, age, or name a function: package.module:function"
        )
    try:
        found = load_reference(name)
    except ConfigError as error:
        raise ConfigError(f"replay.priority: {error}") from error
    if not callable(found):
        raise ConfigError(f"replay.priority: {name!r} is not a function")
    return cast("Priority", found)


def weigh_groups(step_batch: StepBatch, priority: Priority) -> dict[str, float]:
    """Return the weight of each group by its id. Raises ConfigError for a weight that is negative or not finite."""
    weights = {
        taken.group.id: float(priority(taken, magnitude))
        for taken, magnitude in zip(step_batch.groups, step_batch.packed.magnitudes, strict=True)
    }
    for group, weight in weights.items():
        if not math.isfinite(weight) or weight < 0:
            raise ConfigError(
                f"replay.priority gave group {group} the weight {weight}; a weight must be finite and not negative"
            )
    return {group: max(weight, LEAST) for group, weight in weights.items()}
