from __future__ import annotations

import asyncio
import time

from rollout_workers.checking.watching import BEAT_S, STALL_S, stalls_of


def stand_still(seconds: float) -> None:
    time.sleep(seconds)


async def test_a_loop_that_stands_still_is_noticed_where_it_stands():
    with stalls_of(asyncio.get_running_loop()) as stalls:
        stand_still(STALL_S + 5 * BEAT_S)
        await asyncio.sleep(0)
    assert [stall.place.rpartition(" in ")[2] for stall in stalls] == ["stand_still"]


async def test_a_loop_that_is_busy_when_the_watch_ends_does_not_stand_still():
    with stalls_of(asyncio.get_running_loop()) as stalls:
        stand_still(3 * BEAT_S)
    assert stalls == []
