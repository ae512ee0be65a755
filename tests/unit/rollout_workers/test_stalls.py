from __future__ import annotations

import asyncio
import sysconfig
import time
from collections.abc import Callable, Collection

import pytest

from async_rl.config.rollout import EnvironmentConfig
from async_rl.tokenization.tokenizers import Characters
from rollout_workers.checking.findings import judge
from rollout_workers.checking.stalls import BEAT_S, STALL_S, stalls_of
from rollout_workers.checking.trials import EnvironmentTrials


def stand_still(until: Collection[object]) -> None:
    """Until there is something: however long the watch takes to look."""
    while not until:
        time.sleep(BEAT_S)


async def test_a_loop_that_stands_still_is_noticed_where_it_stands():
    with stalls_of("mine") as stalls:
        stand_still(stalls)
        await asyncio.sleep(0)
    assert [stall.place.rpartition(" in ")[2] for stall in stalls] == ["stand_still"]


async def test_a_loop_that_is_busy_when_the_watch_ends_does_not_stand_still():
    began = time.monotonic()
    with stalls_of("mine") as stalls:
        time.sleep(3 * BEAT_S)  # noqa: ASYNC251  (the loop is busy)
    assert stalls == [] or time.monotonic() - began >= STALL_S, "a machine may stand still as well"


def written_in(file: str) -> Callable[[Collection[object]], None]:
    """A function that stands still, and stands in that file."""
    made: dict[str, Callable[[Collection[object]], None]] = {}
    text = f"import time\ndef make(until):\n    while not until:\n        time.sleep({BEAT_S})\n"
    exec(compile(text, file, "exec"), made)
    return made["make"]


@pytest.mark.parametrize("is_packages", [True, False])
async def test_a_package_that_is_slow_to_make_something_is_told_from_code_that_blocks(is_packages: bool):
    folder = sysconfig.get_path("purelib") if is_packages else "/home/me"
    make = written_in(f"{folder}/clients/client.py")
    with stalls_of("mine") as stalls:
        make(stalls)
        await asyncio.sleep(0)
    seen = EnvironmentTrials(section=EnvironmentConfig(type="math"), stalls=[*stalls, *stalls])
    found = judge(seen, Characters("0"), context_tokens=100, max_tokens=10)
    assert len(found.problems) == (0 if is_packages else 2)
    assert len(found.notes) == (1 if is_packages else 0)
    if is_packages:
        assert "(2 times): what is slow to make" in found.notes[0]
