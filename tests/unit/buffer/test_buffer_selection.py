"""The age bound: with `windowed_fifo` no group exceeds max_age, whatever workers do."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from async_rl.replay_protocol import Limits
from buffer.rules.selection import Candidate, fill, is_stale, ordered, overtakes_a_straggler


def candidate(oldest: int, ticket: str, **more) -> Candidate:
    return Candidate(**({"id": ticket, "oldest": oldest, "tokens": 10, "environment": "e", "uses": 0, "draw": 0.0} | more))


LIMITS = Limits(max_age=2, groups_per_step=2, lease_s=1, max_attempts=1)
READY = [candidate(1, "a"), candidate(1, "b"), candidate(2, "c"), candidate(3, "d")]


def choose(
    ready: list[Candidate],
    reserved: dict[int, int],
    version: int,
    num_groups: int,
    max_age: int,
    *,
    wait: bool = True,
    held: int = 0,
) -> list[str]:
    limits = replace(LIMITS, max_age=max_age)
    chosen = fill(
        ordered(ready, "windowed_fifo"),
        batch=[candidate(0, f"held {number}") for number in range(held)],
        version=version,
        num_groups=num_groups,
        max_tokens=None,
        limits=limits,
        nothing_else_can_come=False,
    )
    if chosen is None or (
        wait and overtakes_a_straggler(chosen, reserved, version=version, num_groups=num_groups, age_bound=limits.age_bound)
    ):
        return []
    return [each.id for each in chosen]


def chosen(ready: list[Candidate], reserved: dict[int, int], version: int, num_groups: int = 2, **more) -> list[str]:
    return choose(ready, reserved, version, num_groups, 2, **more)


@pytest.mark.parametrize(
    ("reserved", "version", "more", "expected"),
    [
        ({}, 3, {}, ["a", "b"]),
        ({}, 3, {"num_groups": 5}, []),  # too few
        ({1: 9}, 3, {}, ["a", "b"]),  # the batch could not leave later than the stragglers
        ({1: 1}, 3, {"num_groups": 3}, []),  # c can wait, the straggler cannot
        ({1: 1}, 3, {"num_groups": 3, "wait": False}, ["a", "b", "c"]),
        ({2: 3}, 3, {"num_groups": 3}, ["a", "b", "c"]),  # they leave no later than c
        ({2: 4}, 3, {"num_groups": 4}, ["a", "b", "c", "d"]),  # four stragglers fit into the four places of the next step
        ({2: 5}, 3, {"num_groups": 4}, []),  # five do not
        ({0: 9}, 3, {"num_groups": 3}, ["a", "b", "c"]),  # too late for these: waiting would not save them
        ({1: 1}, 3, {"num_groups": 3, "held": 1}, ["a", "b"]),  # part of the batch was taken before
    ],
)
def test_who_is_waited_for(reserved, version, more, expected):
    assert chosen(READY, reserved, version, **more) == expected


@pytest.mark.parametrize("seed", range(60))
def test_no_schedule_of_workers_makes_anything_stale_or_stops_the_learner(seed: int):
    """Random stragglers, bursts and prefetching learners; tickets are issued as in the buffer, up to the slots."""
    draw = random.Random(seed)
    max_age, num_groups, prefetched = draw.randrange(4), draw.randrange(1, 5), draw.randrange(1, 3)
    slots = (max_age + 1) * num_groups
    live = version = number = 0
    reserved: list[tuple[int, str]] = []
    ready: list[tuple[int, str]] = []
    favourite = draw.random()  # how much the workers like young tickets, so that old ones are overtaken

    for _ in range(3000):
        unpublished = version - live
        free = slots - len(reserved) - len(ready) - unpublished * num_groups
        if draw.random() < 0.5 and free > 0:
            for _ in range(draw.randint(1, free)):
                reserved.append((live, f"t{number:09d}"))
                number += 1
        if reserved and draw.random() < 0.7:
            born, ticket = reserved.pop(-1 if draw.random() < favourite else draw.randrange(len(reserved)))
            ready.append((draw.randint(born, live), ticket))
            ready.sort()
        if unpublished and draw.random() < 0.5:
            live += 1
        if version - live < prefetched and (
            batch := choose(
                [candidate(oldest, ticket) for oldest, ticket in ready],
                Counter(born for born, _ in reserved),
                version,
                num_groups,
                max_age,
            )
        ):
            ready = [entry for entry in ready if entry[1] not in batch]
            version += 1
        assert not any(is_stale(oldest, version=version, age_bound=max_age) for oldest, _ in ready)
        assert not any(is_stale(born, version=version, age_bound=max_age) for born, _ in reserved)
    assert version > 100, "the learner was kept waiting for ever"
