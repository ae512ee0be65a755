"""Pure: which ready groups leave now? Earliest deadline first, and nobody is overtaken to death.

A group's deadline is the last version it may train: its oldest version + max_age. docs/buffer.md proves the rule;
`scripts/take.lua` decides the same, and the contract suite keeps the two equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def is_stale(oldest_version: int, *, version: int, max_age: int) -> bool:
    """The hard bound: weights `version` may no longer be trained on such a group."""
    return oldest_version < version - max_age


def choose(
    ready: Sequence[tuple[int, str]],
    reserved: Mapping[int, int],
    *,
    version: int,
    num_groups: int,
    missing: int,
    max_age: int,
    wait: bool,
) -> list[str]:
    """The ids of the next `missing` groups, or nothing when the learner has to wait.

    `ready` holds (oldest version, id) in ascending order, `reserved` counts tickets in flight by their version. A step
    consumes `num_groups`; `missing` is smaller only when part of the step's batch was taken before.
    """
    if len(ready) < missing:
        return []
    batch = ready[:missing]
    if wait:
        latest_deadline = batch[-1][0] + max_age
        for deadline in range(version, min(latest_deadline, version + max_age + 1)):
            # These stragglers have only the steps after this one to fit into, and the batch would hold a group
            # that could leave later than they can.
            stragglers = sum(count for born, count in reserved.items() if version <= born + max_age <= deadline)
            if stragglers > num_groups * (deadline - version):
                return []
    return [group_id for _, group_id in batch]
