"""Digests are computed beside training: a version can be sent once all ranks have hashed their parcels."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from async_rl.config import WireConfig
from async_rl.errors import WireError
from async_rl.transport.sending.rank_orders import WireOrders
from tests.support.waiting import PATIENCE_S
from tests.unit.async_rl.transport.test_wire_catch_up import HELD, Learner

WIRE = WireConfig(operation_timeout_s=60.0, rendezvous_timeout_s=60.0)


@pytest.fixture
def learner(tmp_path: Path) -> Iterator[Learner]:
    learner = Learner(WIRE, tmp_path / "snapshots")
    yield learner
    for rank_sender in learner.rank_senders:
        rank_sender.close()


def pack(learner: Learner, version: int, *keep: int) -> None:
    for rank_sender, held in zip(learner.rank_senders, HELD, strict=True):
        rank_sender.pack_parcel(version, held, keep=keep)


def test_the_next_version_is_packed_before_the_digest_of_the_last_is_known(learner: Learner) -> None:
    rank_0, rank_1 = learner.rank_senders
    pack(learner, 1)
    first = rank_0.begin_digest(1)
    pack(learner, 2, 1)
    second = rank_0.begin_digest(2)
    assert not first.done(), "rank 1 has not hashed its parcel"
    assert not rank_0.packed
    rank_1.begin_digest(2)
    rank_1.begin_digest(1)
    assert first.result(PATIENCE_S) == second.result(PATIENCE_S), "the same weights"
    assert set(rank_0.packed) == {1, 2}


def test_a_version_that_newer_ones_replace_needs_no_digest(learner: Learner) -> None:
    pack(learner, 1)
    replaced = learner.rank_senders[0].begin_digest(1)
    pack(learner, 2)
    with pytest.raises(WireError, match="version 1 has been given up for newer ones"):
        replaced.result(PATIENCE_S)


def test_a_rank_that_cannot_hash_says_why(learner: Learner) -> None:
    pack(learner, 1)
    digest = learner.rank_senders[0].begin_digest(1)
    WireOrders(learner.orders, 1, fence=1).tell_parcel(1, "RuntimeError: CUDA error: unknown error", lambda: True)
    with pytest.raises(WireError, match="learner rank 1: RuntimeError: CUDA error: unknown error"):
        digest.result(PATIENCE_S)


def test_a_sender_that_is_closed_waits_for_no_rank(learner: Learner) -> None:
    pack(learner, 1)
    digest = learner.rank_senders[0].begin_digest(1)
    learner.rank_senders[0].close()
    assert digest.done()
