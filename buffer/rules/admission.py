"""Pure: how many tickets are free, which worker gets them, and whether a task whose ticket failed gets another one.

`scripts/reserve.lua` and `scripts/prelude.lua` implement the same rules; the contract suite keeps them equal.
"""

from __future__ import annotations

from math import ceil, floor

from async_rl.replay_protocol import Drop, Limits


def free_tickets(limits: Limits, *, used: int, reserved: int, ready: int, owed: float, is_idle: bool) -> int:
    """Return how many tickets may be issued, by the slots and by how far inserts may run ahead of samples.

    `used` may exceed the slots, because groups that return after a crash are counted again: then no ticket is free.
    `is_idle` says that nothing is being rolled out or trained. The rate limiter alone then never blocks: the next step's
    groups may start.
    """
    free = limits.slots - used
    if limits.samples_per_insert is None:
        return free
    room = floor((limits.max_diff - owed) / limits.samples_per_insert) - reserved
    if is_idle:
        room = max(room, max(limits.groups_per_step, limits.min_size) - ready)
    return min(free, room)


def share(free: int, *, asked: int, ahead: int, queue: int) -> int:
    """Return how many tickets a worker gets: first come, first served, and at most an equal share while others wait."""
    return max(0, min(asked, free - ahead, ceil(free / queue)))


def may_sample(limits: Limits, *, ready: int, owed: float, uses: int) -> bool:
    """Whether the rate limiter lets the learner sample `uses` more groups now."""
    return limits.samples_per_insert is None or (ready >= limits.min_size and owed - uses >= limits.min_diff)


def counts_as_failure(reason: Drop | None) -> bool:
    """Whether the outcome counts towards leases.max_attempts. None stands for a quarantined payload."""
    return reason is None or reason == "failed"


def goes_again(reason: Drop | None, *, failures: int, max_attempts: int) -> bool:
    """Whether the task gets another ticket; `failures` includes the one that just happened."""
    if reason in ("no_signal", "detached"):
        return False
    return not counts_as_failure(reason) or failures < max_attempts
