"""Pure: may one more group start, who gets it, and does a task whose ticket came to nothing start again?

The Redis scripts decide the same in `scripts/reserve.lua` and `scripts/prelude.lua`; the contract suite keeps them equal.
"""

from __future__ import annotations

from math import ceil, floor

from async_rl.replay_protocol import Drop, Limits


def free_tickets(limits: Limits, *, used: int, reserved: int, ready: int, owed: float, is_quiet: bool) -> int:
    """By the slots, and by how far inserts may run ahead of samples.

    `used` may exceed the slots: groups that come back after a crash are charged again. Then everybody just waits.
    `is_quiet` says that nobody is at work whom another one could wait for: then the rate alone stops nobody.
    """
    free = limits.slots - used
    if limits.samples_per_insert is None:
        return free
    room = floor((limits.max_diff - owed) / limits.samples_per_insert) - reserved
    if is_quiet:
        room = max(room, max(limits.groups_per_step, limits.min_size) - ready)
    return min(free, room)


def share(free: int, *, asked: int, ahead: int, queue: int) -> int:
    """First come, first served; and nobody takes more than an equal share while others wait."""
    return max(0, min(asked, free - ahead, ceil(free / queue)))


def may_sample(limits: Limits, *, ready: int, owed: float, uses: int) -> bool:
    """Whether the learner may use groups `uses` times more before further ones arrive."""
    return limits.samples_per_insert is None or (ready >= limits.min_size and owed - uses >= limits.min_diff)


def counts_as_failure(reason: Drop | None) -> bool:
    """Whether the task itself is suspect. `None` stands for a quarantined payload: a task that always makes one is poison."""
    return reason is None or reason == "failed"


def goes_again(reason: Drop | None, *, failures: int, max_attempts: int) -> bool:
    """Whether the task gets another ticket; `failures` includes the one that has just happened."""
    if reason in ("no_signal", "detached"):
        return False
    return not counts_as_failure(reason) or failures < max_attempts
