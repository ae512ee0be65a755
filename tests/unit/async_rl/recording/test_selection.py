"""Filters and orders of the list of rollouts, against the obvious way to compute them; a million rollouts are quick."""

import random
import time

import pytest

from async_rl.recording.rows import GroupRow, RolloutFilter, RolloutRow
from async_rl.recording.selection import Order, Selection


def groups(number: int, siblings: int) -> list[GroupRow]:
    chance = random.Random(0)
    return [
        GroupRow(
            id=f"t{index:09d}",
            at=float(index),
            fate="trained" if index % 3 else "no_signal",
            step=index // 10 if index % 3 else None,
            age=index % 4 if index % 3 else None,
            environment="ab"[index % 2],
            task=str(index),
            worker="w",
            attempt=1,
            offset=0,
            length=1,
            checksum=0,
            numbers=tuple(
                (None, "failed", 0, 5, 1, None, None)
                if sibling == 2
                else (chance.random(), "ok", chance.randrange(100), 150, 1, 0.5, chance.random())
                for sibling in range(siblings)
            ),
        )
        for index in range(number)
    ]


FILTERS = (
    RolloutFilter(),
    RolloutFilter(environment="a"),
    RolloutFilter(fate="dropped", max_reward=0.5),
    RolloutFilter(status="failed"),
    RolloutFilter(min_reward=0.0),
    RolloutFilter(min_sampled=10, max_sampled=40, min_age=1),
    RolloutFilter(environment="none"),
)
KEYS = {
    "best": lambda row: -row.reward if row.reward is not None else 2.0,
    "worst": lambda row: row.reward if row.reward is not None else 2.0,
    "longest": lambda row: -row.sampled,
    "slowest": lambda row: -row.seconds if row.seconds is not None else 2.0,
    "quickest": lambda row: row.seconds if row.seconds is not None else 2.0,
    "stalest": lambda row: -row.group.age if row.group.age is not None else 9.0,
}


@pytest.mark.parametrize("wanted", FILTERS)
@pytest.mark.parametrize("order", ["newest", "oldest", "best", "worst", "longest", "stalest", "slowest", "quickest"])
def test_rollouts_are_filtered_and_sorted(wanted: RolloutFilter, order: Order):
    recorded = groups(40, 3)
    ordered = recorded if order == "oldest" else recorded[::-1]
    naive: list[RolloutRow] = [
        row for group in ordered if wanted.accepts_group(group) for row in group.rollouts if wanted.accepts(row)
    ]
    naive.sort(key=KEYS.get(order, lambda row: 0))
    selection = Selection(recorded, wanted, order)
    assert [row.id for row in selection.rows()] == [row.id for row in naive]
    assert len(selection) == len(naive)
    assert list(selection.rows(5, 9)) == naive[5:9]


def test_a_million_rollouts_are_listed_quickly():
    recorded = groups(1000, 16) * 62  # 992,000 rollouts
    began = time.process_time()
    for wanted, order in ((RolloutFilter(), "newest"), (RolloutFilter(min_reward=0.99), "best")):
        selection = Selection(recorded, wanted, order)
        assert len(list(selection.rows(100, 150))) == 50
    assert time.process_time() - began < 3  # six with an object for each rollout
