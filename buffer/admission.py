"""Pure: may one more group start, and does a task whose ticket came to nothing start again?

The Redis scripts decide the same in `scripts/reserve.lua` and `scripts/prelude.lua`; the contract suite keeps them equal.
"""

from __future__ import annotations

from async_rl.protocols import Drop, Limits


def free_slots(limits: Limits | None, *, used: int, live_version: int, worker_version: int) -> int:
    """How many tickets may be given to a worker whose engine holds `worker_version`.

    `used` may exceed the slots: groups that come back after a crash are charged again. Then everybody just waits.
    """
    if limits is None or live_version < 0 or worker_version < live_version:
        return 0
    return max(0, limits.slots - used)


def counts_as_failure(reason: Drop | None) -> bool:
    """Whether the task itself is suspect. `None` stands for a quarantined payload: a task that always makes one is poison."""
    return reason is None or reason == "failed"


def goes_again(reason: Drop | None, *, failures: int, max_attempts: int) -> bool:
    """Whether the task gets another ticket; `failures` includes the one that has just happened."""
    if reason == "no_signal":
        return False
    return not counts_as_failure(reason) or failures < max_attempts
