"""The rendezvous of ranks on several machines, over a store in Redis that dead ranks may have written to.

Every process registers under a random name, so a restarted rank is never confused with its dead predecessor.

    rank r    here/r = NAME ──────────────▶ rank 0    (a random name of this process)
              answer/NAME/LIFE ◀── call/NAME = LIFE   a dead rank's name is called too, but never answers
              uses store ranks/LIFE ◀── start/LIFE    once every registered rank has answered

LIFE is the fence of rank 0's lease. It is unique among the learners of a run, so process groups never share keys.
"""

from __future__ import annotations

import time
import uuid
from contextlib import suppress
from datetime import timedelta

from torch.distributed import DistStoreError, Store  # pyright: ignore[reportPrivateImportUsage]

from async_rl.errors import ConfigError, ServiceStopped

LOOK_AGAIN = timedelta(seconds=1)
"""How soon a restarted rank is noticed: it registers under a new name while others wait for the old one."""


def wait_for_ranks(store: Store, *, world_size: int, life: int, within: timedelta) -> None:
    """Called by rank 0: return when every other rank has answered. Raises ServiceStopped that names a missing rank."""
    deadline = time.monotonic() + within.total_seconds()
    store.set_timeout(within)

    def has_answered(rank: int) -> bool:
        try:
            name = store.get(f"here/{rank}").decode()
        except DistStoreError:
            raise _missing_rank(rank, world_size, within) from None
        answer = f"answer/{name}/{life}"
        if store.check([answer]):
            return True
        if time.monotonic() > deadline:
            raise _missing_rank(rank, world_size, within)
        store.set(f"call/{name}", f"{life} {world_size}")
        with suppress(DistStoreError):
            store.wait([answer], LOOK_AGAIN)
        return False  # checked again after the others have answered: it may have died meanwhile

    others = range(1, world_size)
    while sum(has_answered(rank) for rank in others) < len(others):
        pass
    store.set(f"start/{life}", "")


def wait_for_rank_0(store: Store, *, rank: int, world_size: int, within: timedelta) -> int:
    """Called by ranks above 0: return the life of the rank 0 that all ranks answered. Raises ServiceStopped on timeout."""
    deadline = time.monotonic() + within.total_seconds()
    store.set_timeout(within)
    name = uuid.uuid4().hex
    store.set(f"here/{rank}", name)
    while time.monotonic() < deadline:
        try:
            life, expected = map(int, store.get(f"call/{name}").split())
        except DistStoreError:
            break
        if expected != world_size:
            raise ConfigError(f"WORLD_SIZE is {world_size} for rank {rank} and {expected} for rank 0")
        store.set(f"answer/{name}/{life}", "")
        with suppress(DistStoreError):  # rank 0 still waits for others, or has been started again
            store.wait([f"start/{life}"], LOOK_AGAIN)
            return life
    raise _missing_rank(0, world_size, within)


def _missing_rank(rank: int, world_size: int, within: timedelta) -> ServiceStopped:
    return ServiceStopped(
        f"rank {rank} of {world_size} has not registered within {within.total_seconds():g} s; are all ranks started?"
    )
