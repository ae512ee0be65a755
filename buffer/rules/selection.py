"""Pure: which ready groups leave now?

The order is the selector's; quotas and a token budget shape the batch; `windowed_fifo` also asks whether somebody who is
not here yet would be overtaken to death. docs/buffer.md proves that rule; `scripts/take.lua` decides the same, and the
contract suite keeps the two equal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from async_rl.replay_protocol import Limits, Selector


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A ready group, as far as its selection goes."""

    id: str
    oldest: int
    """Version of its oldest token."""
    tokens: int
    environment: str
    uses: int
    """Steps that it has trained."""
    draw: float
    """Its moment in the lottery."""


def is_stale(oldest_version: int, *, version: int, age_bound: int) -> bool:
    """The hard bound: weights `version` may no longer be trained on such a group."""
    return oldest_version < version - age_bound


def ordered(ready: Sequence[Candidate], selector: Selector) -> list[Candidate]:
    """Who goes first. Of the three orders by age, groups that never trained come before those that did."""
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
    """What joins `batch`, which a step may hold already, or None when it does not become full."""
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
    # Quotas shape a batch; they never stop a run in which nothing else can come.
    if nothing_else_can_come and any(is_full_with(candidate) for candidate in skipped):
        return chosen
    return None


def overtakes_a_straggler(
    chosen: Sequence[Candidate], reserved: Mapping[int, int], *, version: int, num_groups: int, age_bound: int
) -> bool:
    """Somebody in flight would have no place left before it is too old, and the batch holds a group that could leave later.

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
