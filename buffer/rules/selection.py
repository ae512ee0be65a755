"""Pure: which ready groups the learner takes for a step.

The selector orders them; quotas and a token budget shape the batch; `windowed_fifo` also waits for groups in flight that
would otherwise become too old. docs/buffer.md proves that rule. `scripts/take.lua` implements the same, and the contract
suite keeps the two equal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from async_rl.replay_protocol import Limits, Selector


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """What selection needs to know of a ready group."""

    id: str
    oldest: int
    """Version of its oldest sampled token."""
    tokens: int
    environment: str
    uses: int
    """Number of steps that trained it."""
    draw: float
    """Its key in the weighted draw; the smallest key is sampled first."""


def is_stale(oldest_version: int, *, version: int, age_bound: int) -> bool:
    """Whether a group is too old to train weights `version` on."""
    return oldest_version < version - age_bound


def ordered(ready: Sequence[Candidate], selector: Selector) -> list[Candidate]:
    """Return the groups in the selector's order. By age, groups that never trained come before those that did."""
    if selector in ("uniform", "prioritized"):
        return sorted(ready, key=lambda candidate: (candidate.draw, candidate.id))
    sign = -1 if selector == "freshest" else 1
    by_age = sorted(ready, key=lambda candidate: (sign * candidate.oldest, candidate.id))
    return sorted(by_age, key=lambda candidate: candidate.uses > 0)


def fill(
    order: Sequence[Candidate],
    *,
    batch: Sequence[Candidate],
    version: int,
    num_groups: int,
    max_tokens: int | None,
    limits: Limits,
    nothing_else_can_come: bool,
) -> list[Candidate] | None:
    """Return the groups that complete `batch` (what the step holds already); None if it cannot be completed now."""
    chosen: list[Candidate] = []
    skipped: list[Candidate] = []
    tokens = sum(candidate.tokens for candidate in batch)
    environments = Counter(candidate.environment for candidate in batch)

    def is_full_with(candidate: Candidate) -> bool:
        nonlocal tokens
        if max_tokens is not None and (batch or chosen) and tokens + candidate.tokens > max_tokens:
            return True
        tokens += candidate.tokens
        environments[candidate.environment] += 1
        chosen.append(candidate)
        return len(batch) + len(chosen) >= num_groups

    for candidate in order:
        quota = limits.quotas.get(candidate.environment)
        is_in_its_last_version = candidate.oldest <= version - limits.age_bound
        if quota is not None and environments[candidate.environment] >= quota and not is_in_its_last_version:
            skipped.append(candidate)
        elif is_full_with(candidate):
            return chosen
    # Quotas shape a batch; they never stop a run in which no other group can come.
    if nothing_else_can_come and any(is_full_with(candidate) for candidate in skipped):
        return chosen
    return None


def overtakes_a_straggler(
    chosen: Sequence[Candidate], reserved: Mapping[int, int], *, version: int, num_groups: int, age_bound: int
) -> bool:
    """Whether taking `chosen` now would leave a group in flight no place in a batch before it is too old, although a chosen
    group could be taken later.

    `reserved` counts tickets in flight by their version.
    """
    horizon = max(
        (candidate.oldest + age_bound - 1 if candidate.uses == 0 else version + age_bound for candidate in chosen), default=-1
    )
    for deadline in range(version, min(horizon, version + age_bound) + 1):
        stragglers = sum(count for born, count in reserved.items() if version <= born + age_bound <= deadline)
        if stragglers > num_groups * (deadline - version):
            return True
    return False
