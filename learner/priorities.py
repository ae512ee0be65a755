"""How likely a group is to be trained again, once it has trained a step (staleness.selector: prioritized)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import cast

from async_rl.config.references import load_reference
from async_rl.errors import ConfigError
from async_rl.types import TakenGroup
from learner.prefetch import StepBatch

Priority = Callable[[TakenGroup, float], float]
"""A group and the mean |advantage| of its rollouts -> its weight; 1 is the weight of a group that has not trained yet."""

LEAST = 1e-3
"""Whatever is left in the buffer keeps a chance."""


def by_advantage(_taken: TakenGroup, advantage: float) -> float:
    return advantage


def by_age(taken: TakenGroup, _advantage: float) -> float:
    return 1 / (1 + taken.age)


def load_priority(name: str) -> Priority:
    """`replay.priority` of the configuration."""
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
        raise ConfigError(f"replay.priority: {name!r} is no function")
    return cast("Priority", found)


def weigh_groups(step_batch: StepBatch, priority: Priority) -> dict[str, float]:
    weights = {
        taken.group.id: float(priority(taken, magnitude))
        for taken, magnitude in zip(step_batch.groups, step_batch.packed.magnitudes, strict=True)
    }
    for group, weight in weights.items():
        if not math.isfinite(weight) or weight < 0:
            raise ConfigError(f"replay.priority gave group {group} the weight {weight}; a weight is a number from 0 on")
    return {group: max(weight, LEAST) for group, weight in weights.items()}
