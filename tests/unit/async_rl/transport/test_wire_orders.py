"""Orders to ranks above 0, including invalid ones that rank 0 did not write."""

from __future__ import annotations

import json
import threading
from queue import Queue

import pytest
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from async_rl.errors import WireError
from async_rl.transport.sending.rank_orders import WireOrder, WireOrders, WriteParcel

FENCE, WITHIN_S = 7, 30.0


class Ranks:
    def __init__(self) -> None:
        self.store = HashStore()
        self.first, self.second = (WireOrders(self.store, rank, fence=FENCE) for rank in range(2))
        self.done: Queue[WireOrder] = Queue()

    def follow(self) -> None:
        self.second.follow(1, self.done.put)

    def close(self) -> None:
        self.first.close()
        self.second.close()


def test_what_rank_0_wants_is_done_and_answered() -> None:
    ranks = Ranks()
    ranks.follow()
    wanted = WriteParcel(parcel=1, version=3)
    number = ranks.first.post([wanted, WriteParcel(parcel=0, version=3)])
    ranks.first.wait_for_result(number, 1, WITHIN_S)
    assert ranks.done.get(timeout=WITHIN_S) == wanted
    assert ranks.done.empty(), "the other parcel is not its own"
    ranks.close()


@pytest.mark.parametrize(
    "forged",
    [
        "not JSON",
        "[" * 100_000,
        "[1]",
        json.dumps([{"parcel": 1, "version": 1, "folder": "/somewhere/else"}]),
        json.dumps([{"parcel": 1, "version": 1, "group": "g", "size": 10**9, "backend": "gloo", "base": -1}]),
    ],
    ids=["text", "deep", "number", "folder", "size"],
)
def test_an_invalid_order_is_ignored_and_the_next_one_carried_out(forged: str) -> None:
    ranks = Ranks()
    ranks.store.set(f"{FENCE}/errands/0", forged)
    ranks.follow()
    number = ranks.first.post([WriteParcel(parcel=1, version=2)])
    ranks.first.wait_for_result(number, 1, WITHIN_S)
    assert ranks.done.get(timeout=WITHIN_S) == WriteParcel(parcel=1, version=2)
    ranks.close()


def test_a_failure_is_told_to_rank_0_and_ends_nothing() -> None:
    ranks = Ranks()

    def fail(order: WireOrder) -> None:
        raise WireError("the disk is full") if order.version == 1 else ValueError("a bug")

    ranks.second.follow(1, fail)
    for version, said in ((1, "learner rank 1: the disk is full"), (2, "learner rank 1: a bug")):
        number = ranks.first.post([WriteParcel(parcel=1, version=version)])
        with pytest.raises(WireError, match=said):
            ranks.first.wait_for_result(number, 1, WITHIN_S)
    ranks.close()


def test_who_is_told_that_there_is_no_more_ends_when_it_is_closed() -> None:
    ranks = Ranks()
    ranks.follow()
    ranks.close()
    assert "weight-orders" not in [thread.name for thread in threading.enumerate()]
