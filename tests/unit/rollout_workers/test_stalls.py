from __future__ import annotations

import asyncio
import sysconfig
import time
from collections.abc import Callable

import pytest

from async_rl.config.rollout import EnvironmentConfig
from async_rl.tokenization.tokenizers import Characters
from rollout_workers.checking.findings import judge
from rollout_workers.checking.stalls import BEAT_S, STALL_S, stalls_of
from rollout_workers.checking.trials import EnvironmentTrials


def stand_still(seconds: float) -> None:
    time.sleep(seconds)


async def test_a_loop_that_stands_still_is_noticed_where_it_stands():
    with stalls_of("mine") as stalls:
        stand_still(STALL_S + 5 * BEAT_S)
        await asyncio.sleep(0)
    assert [stall.place.rpartition(" in ")[2] for stall in stalls] == ["stand_still"]


async def test_a_loop_that_is_busy_when_the_watch_ends_does_not_stand_still():
    with stalls_of("mine") as stalls:
        stand_still(3 * BEAT_S)
    assert stalls == []


def written_in(file: str) -> Callable[[], None]:
    """A function that stands still, and stands in that file."""
    made: dict[str, Callable[[], None]] = {}
    text = f"import time\ndef make():\n    time.sleep({STALL_S + 5 * BEAT_S})\n"
    exec(compile(text, file, "exec"), made)
    return made["make"]


@pytest.mark.parametrize("is_packages", [True, False])
async def test_a_package_that_is_slow_to_make_something_is_told_from_code_that_blocks(is_packages: bool):
    folder = sysconfig.get_path("purelib") if is_packages else "/home/me"
    make = written_in(f"{folder}/clients/client.py")
    with stalls_of("mine") as stalls:
        make()
        await asyncio.sleep(0)
    seen = EnvironmentTrials(section=EnvironmentConfig(type="math"), stalls=[*stalls, *stalls])
    found = judge(seen, Characters("0"), context_tokens=100, max_tokens=10)
    assert len(found.problems) == (0 if is_packages else 2)
    assert len(found.notes) == (1 if is_packages else 0)
    if is_packages:
        assert "(2 times): what is slow to make" in found.notes[0]
