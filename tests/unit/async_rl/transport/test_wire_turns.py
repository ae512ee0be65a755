"""Parcels of two senders: fetched concurrently, or in turn where a GPU may not take part in two groups at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from threading import Barrier, Event

import pytest
import torch

from async_rl.config import WireConfig
from async_rl.errors import WireError
from async_rl.transport.receiving.parcel_receiver import OnReceived
from async_rl.transport.sending.rank_orders import WriteParcel
from async_rl.transport.wire.gpus import takes_turns
from tests.support.waiting import PATIENCE_S
from tests.unit.async_rl.transport.test_wire_catch_up import TENSORS, Learner, catch_up

APART = WireConfig(operation_timeout_s=60.0, rendezvous_timeout_s=60.0, shared_memory=False)


def fill_from(learner: Learner, version: int, number: int, data: torch.Tensor, on_received: OnReceived) -> None:
    data.copy_(learner.rank_senders[number].parcel(version))
    on_received(len(data))


@pytest.fixture
def learner(tmp_path: Path) -> Iterator[Learner]:
    learner = Learner(APART, tmp_path / "snapshots")
    yield learner
    for rank_sender in learner.rank_senders:
        rank_sender.close()


def test_only_nccl_takes_turns() -> None:
    assert (takes_turns("nccl"), takes_turns("gloo")) == (True, False)


@pytest.mark.parametrize("in_turn", [True, False])
def test_parcels_are_fetched_in_the_order_of_their_numbers_or_at_once(learner: Learner, in_turn: bool) -> None:
    record = learner.pack()
    both = Barrier(2)
    running: list[int] = []
    begun: list[tuple[int, list[int]]] = []

    def fetch(number: int, data: torch.Tensor, on_received: OnReceived) -> None:
        begun.append((number, [*running]))
        running.append(number)
        if not in_turn:
            both.wait(PATIENCE_S)
        fill_from(learner, record.version, number, data, on_received)
        running.remove(number)

    receiver = catch_up(APART).new_receiver()
    received = receiver.fetch(receiver.expect_from_learner(record, learner.source), fetch, in_turn=in_turn)
    assert all(torch.equal(received.weights[name], tensor) for name, tensor in TENSORS.items())
    if in_turn:
        assert begun == [(0, []), (1, [])]


def test_after_a_parcel_that_failed_none_is_begun(learner: Learner) -> None:
    record = learner.pack()
    begun: list[int] = []

    def fetch(number: int, data: torch.Tensor, on_received: OnReceived) -> None:
        begun.append(number)
        raise WireError("the sender died")

    receiver = catch_up(APART).new_receiver()
    with pytest.raises(WireError, match="the sender died"):
        receiver.fetch(receiver.expect_from_learner(record, learner.source), fetch, in_turn=True)
    assert begun == [0]


@pytest.mark.parametrize("in_turn", [True, False])
def test_a_sender_begins_once_the_one_before_it_has_succeeded(learner: Learner, in_turn: bool) -> None:
    record = learner.pack()
    orders = [WriteParcel(parcel=0, version=record.version + 1), WriteParcel(parcel=1, version=record.version)]
    with pytest.raises(WireError, match="has been given up"):
        learner.rank_senders[0].run_orders(orders, Event(), in_turn=in_turn)
    assert learner.orders.check(["1/errands/0"]) is not in_turn, "what rank 1 was ordered to do"
