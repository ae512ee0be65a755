"""The weight wire with sender and receivers in one process: what is served, and what never is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import torch
from torch._C._distributed_c10d import HashStore
from wire_board import board_of, go_live
from wire_weights import record_of, weights

from async_rl.config import WireConfig
from async_rl.errors import FleetMismatch, ServiceStopped, WireError, first_of_ours
from async_rl.protocols import Member
from async_rl.transport.digest import digest_of, specs_of
from async_rl.transport.messages import Offer
from async_rl.transport.receiver import WeightReceiver
from async_rl.transport.sender import WeightSender
from async_rl.transport.staging import Staging
from async_rl.transport.wire_process_group import Seat
from buffer.board import RedisBoard

WIRE = WireConfig(bucket_mb=0.25)


class Worker:
    """An engine that keeps a note of every version handed to it."""

    def __init__(self, board: RedisBoard, name: str, tensors: Mapping[str, torch.Tensor], wire: WireConfig = WIRE) -> None:
        self.name = name
        self.served: list[tuple[int, str]] = []
        member = Member(id=name, host="localhost", version=-1, device="cpu")
        self._receiver = WeightReceiver(board, member, specs_of(tensors), wire, lease_s=10.0)
        self._news = asyncio.Condition()

    async def run(self) -> None:
        await self._receiver.run(self._swap)

    async def serves(self, version: int) -> None:
        async with self._news:
            await self._news.wait_for(lambda: any(served == version for served, _ in self.served))

    async def _swap(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        async with self._news:
            self.served.append((version, digest_of(tensors)))
            self._news.notify_all()


@asynccontextmanager
async def running(*workers: Worker) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(worker.run()) for worker in workers]
        yield
        for task in tasks:
            task.cancel()


async def all_needy(sender: WeightSender, version: int, *workers: Worker) -> None:
    while set(await sender.needed(version)) < {worker.name for worker in workers}:  # noqa: ASYNC110
        await asyncio.sleep(0.01)


@pytest.fixture
async def board(redis_server: str, run_name: str) -> AsyncIterator[RedisBoard]:
    async with board_of(redis_server, run_name) as board:
        yield board


async def test_everybody_serves_the_bits_that_were_pushed(board: RedisBoard) -> None:
    workers = [Worker(board, f"w{number}", weights(0)) for number in range(3)]
    async with running(*workers), WeightSender(board, WIRE, "cpu", fence=1) as sender:
        await all_needy(sender, 1, *workers)
        for version in (1, 2, 5):
            pushed = weights(seed=version)
            record = record_of(version, pushed)
            report = await sender.push(record, pushed)
            assert set(report.staged) == {"w0", "w1", "w2"}
            assert report.dropped == {}
            assert all(len(worker.served) < version for worker in workers), "nothing is served before the flip"
            await sender.flip(record)
            for worker in workers:
                await worker.serves(version)
                assert worker.served[-1] == (version, record.digest)
    assert await board.members() == [], "a receiver that ends takes itself off the list"


async def test_a_late_joiner_says_so_and_catches_up(board: RedisBoard) -> None:
    first, late = Worker(board, "first", weights(0)), Worker(board, "late", weights(0))
    pushed = weights(seed=3)
    record = record_of(3, pushed)
    async with running(first), WeightSender(board, WIRE, "cpu", fence=1) as sender:
        await sender.needed(3)
        await sender.push(record, pushed)
        await sender.flip(record)
        await first.serves(3)
        async with running(late):
            assert await sender.needed(3) == ["late"]
            report = await sender.push(record, pushed)
            assert report.staged == ("late",)
            await sender.flip(record)
            await late.serves(3)
    assert first.served == late.served == [(3, record.digest)]


async def test_a_worker_of_a_run_that_was_lost_starts_again(board: RedisBoard, redis_server: str, run_name: str) -> None:
    """Redis and the run's folder were emptied together, so another learner counts from 0: no version may go back in here."""
    worker = Worker(board, "w", weights(0))
    pushed = weights(seed=5)
    record = record_of(5, pushed)

    async def lose_the_run() -> None:
        async with running(worker), WeightSender(board, WIRE, "cpu", fence=1) as sender:
            await sender.needed(5)
            await sender.push(record, pushed)
            await sender.flip(record)
            await worker.serves(5)
            await go_live(redis_server, run_name, replace(record, version=0, timeline="another"))
            await asyncio.Future()

    with pytest.raises(BaseExceptionGroup) as broken:
        await lose_the_run()
    found = first_of_ours(broken.value)
    assert isinstance(found, ServiceStopped)
    assert "serves version 5" in str(found)
    assert worker.served == [(5, record.digest)]


async def test_a_push_with_nobody_in_need_moves_nothing(board: RedisBoard) -> None:
    worker = Worker(board, "w", weights(0))
    pushed = weights(seed=2)
    async with running(worker), WeightSender(board, WIRE, "cpu", fence=1) as sender:
        await sender.needed(2)
        record = record_of(2, pushed)
        await sender.push(record, pushed)
        assert await sender.needy(2) == [], "staged is enough, served or not"
        await sender.flip(record)
        await worker.serves(2)
        older = weights(seed=1)
        for version, tensors in ((2, pushed), (1, older)):
            report = await sender.push(record_of(version, tensors), tensors)
            assert (report.staged, report.dropped) == ((), {})
            await sender.flip(record_of(version, tensors))
    assert [version for version, _ in worker.served] == [2]


async def test_weights_that_arrive_damaged_are_never_served(board: RedisBoard) -> None:
    worker = Worker(board, "w", weights(0))
    async with running(worker), WeightSender(board, WIRE, "cpu", fence=1) as sender:
        await sender.needed(1)
        sound = weights(seed=1)
        record = record_of(1, sound)
        damaged = {name: tensor.clone() for name, tensor in sound.items()}
        damaged["layers.0.norm"].view(torch.uint8)[5] ^= 1
        report = await sender.push(record, damaged)
        assert report.staged == ()
        assert "digest" in report.dropped["w"]
        await sender.flip(record)
        assert await sender.needed(1) == ["w"], "told of a version it does not hold, the worker asks for it"
        assert worker.served == []
        assert (await sender.push(record, sound)).staged == ("w",)
        await sender.flip(record)
        await worker.serves(1)
    assert worker.served == [(1, record.digest)]


async def test_staged_weights_that_never_went_live_give_way_to_the_next(board: RedisBoard) -> None:
    worker = Worker(board, "w", weights(0))
    forgotten, served = weights(seed=1), weights(seed=2)
    async with running(worker), WeightSender(board, WIRE, "cpu", fence=1) as sender:
        await sender.needed(1)
        await sender.push(record_of(1, forgotten), forgotten)
        await sender.push(record_of(2, served), served)
        await sender.flip(record_of(1, forgotten))
        await sender.flip(record_of(2, served))
        await worker.serves(2)
    assert worker.served == [(2, digest_of(served))]


async def test_a_version_that_is_live_is_served_though_its_learner_died_before_the_flip(
    board: RedisBoard, redis_server: str, run_name: str
) -> None:
    worker = Worker(board, "w", weights(0))
    pushed = weights(seed=1)
    async with running(worker):
        async with WeightSender(board, WIRE, "cpu", fence=1) as sender:
            await sender.needed(1)
            await sender.push(record_of(1, pushed), pushed)
            await go_live(redis_server, run_name, record_of(1, pushed))
        await worker.serves(1)


async def test_running_workers_follow_a_new_learner_and_no_longer_the_old_one(board: RedisBoard) -> None:
    wire = WireConfig(bucket_mb=0.25, operation_timeout_s=2.0, rendezvous_timeout_s=4.0)
    worker = Worker(board, "w", weights(0), wire)
    old, new, stale = (weights(seed=seed) for seed in (1, 2, 3))
    async with running(worker), WeightSender(board, wire, "cpu", fence=1) as first:
        await first.needed(1)
        await first.push(record_of(1, old), old)
        await first.flip(record_of(1, old))
        await worker.serves(1)
        async with WeightSender(board, wire, "cpu", fence=2) as second:
            assert await second.needed(2) == ["w"]
            await second.push(record_of(2, new, timeline="b"), new)
            await second.flip(record_of(2, new, timeline="b"))
            await worker.serves(2)
            report = await first.push(record_of(3, stale), stale)
            assert "did not answer" in report.dropped["w"]
            await first.flip(record_of(3, stale))
            newest = weights(seed=4)
            await second.push(record_of(4, newest, timeline="b"), newest)
            await second.flip(record_of(4, newest, timeline="b"))
            await worker.serves(4)
    assert worker.served == [(1, digest_of(old)), (2, digest_of(new)), (4, digest_of(newest))]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"scale": torch.zeros(2)}, r"sends scale float32\[\], this model has scale float32\[2\]"),
        ({"layers.0.norm": torch.zeros(64).half()}, "this model has layers.0.norm float16"),
        ({"extra": torch.zeros(1)}, "this model has extra .* does not send"),
    ],
)
async def test_a_worker_with_another_model_is_refused_with_the_difference(
    board: RedisBoard, change: dict[str, torch.Tensor], says: str
) -> None:
    pushed = weights(seed=1)
    fits, stranger = Worker(board, "fits", pushed), Worker(board, "stranger", pushed | change)
    refusals: list[BaseException | None] = []

    async def run_stranger() -> None:
        try:
            await stranger.run()
        except* FleetMismatch as error:
            refusals.append(first_of_ours(error))

    async with running(fits), asyncio.TaskGroup() as group, WeightSender(board, WIRE, "cpu", fence=1) as sender:
        group.create_task(run_stranger())
        await all_needy(sender, 1, fits, stranger)
        report = await sender.push(record_of(1, pushed), pushed)
        assert report.staged == ("fits",)
        await sender.flip(record_of(1, pushed))
        await fits.serves(1)
    with pytest.raises(FleetMismatch, match=says):
        raise refusals[0] or AssertionError
    assert stranger.served == []
    assert report.dropped["stranger"] in str(refusals[0])


async def test_malformed_and_foreign_messages_change_nothing(board: RedisBoard) -> None:
    worker = Worker(board, "w", weights(0))
    pushed = weights(seed=1)
    async with running(worker), WeightSender(board, WIRE, "cpu", fence=1) as sender:
        await sender.needed(1)
        for topic in ("weights-to-workers", "weights-to-learner"):
            for message in ({}, {"kind": "offer"}, {"kind": "nonsense", "fence": 1}, {"kind": "staged", "fence": "x"}):
                await board.post(topic, message)
        await board.post("weights-to-learner", {"kind": "staged", "fence": 1, "generation": 99, "member": "w"})
        await sender.push(record_of(1, pushed), pushed)
        await sender.flip(replace(record_of(1, pushed), digest="of something else"))
        await sender.flip(record_of(1, pushed))
        await worker.serves(1)
    assert worker.served == [(1, digest_of(pushed))]


async def test_an_address_that_is_not_ours_is_named(board: RedisBoard) -> None:
    worker = Worker(board, "w", weights(0))
    pushed = weights(seed=1)
    wire = WireConfig(host="203.0.113.7")
    async with running(worker), WeightSender(board, WIRE, "cpu", fence=1) as sender:
        await sender.needed(1)
        with pytest.RaisesGroup(pytest.RaisesExc(WireError, match="wire.host: cannot listen at '203.0.113.7'")):
            async with WeightSender(board, wire, "cpu", fence=2) as astray:
                await astray.push(record_of(1, pushed), pushed)


async def test_the_process_groups_of_others_are_left_alone(board: RedisBoard) -> None:
    is_ours = not torch.distributed.is_initialized()  # else an earlier test's model left one
    if is_ours:
        torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        before = torch.distributed.group.WORLD
        worker = Worker(board, "w", weights(0))
        pushed = weights(seed=1)
        async with running(worker), WeightSender(board, WIRE, "cpu", fence=1) as sender:
            await sender.needed(1)
            assert (await sender.push(record_of(1, pushed), pushed)).staged == ("w",)
        assert torch.distributed.group.WORLD is before
        ones = torch.ones(2)
        torch.distributed.all_reduce(ones)
        assert ones.tolist() == [1, 1]
    finally:
        if is_ours:
            torch.distributed.destroy_process_group()


class Deaf(WeightReceiver):
    """Answers on the board, but cannot be reached: what a firewall between it and the learner looks like."""

    def _receive_blocking(self, offer: Offer, seat: Seat, spare: Staging | None) -> tuple[Staging, str]:
        raise WireError("cannot reach the learner")


async def test_one_that_cannot_be_reached_costs_the_others_nothing(board: RedisBoard) -> None:
    wire = WireConfig(bucket_mb=0.25, operation_timeout_s=2.0, rendezvous_timeout_s=4.0)
    pushed = weights(seed=1)
    workers = [Worker(board, f"w{number}", pushed, wire) for number in range(3)]
    deaf = Worker(board, "deaf", pushed, wire)
    deaf._receiver = Deaf(
        board, Member(id="deaf", host="localhost", version=-1, device="cpu"), specs_of(pushed), wire, lease_s=10.0
    )
    async with running(*workers, deaf), WeightSender(board, wire, "cpu", fence=1) as sender:
        await all_needy(sender, 1, *workers, deaf)
        report = await sender.push(record_of(1, pushed), pushed)
    assert set(report.staged) == {"w0", "w1", "w2"}
    assert "cannot reach the learner" in report.dropped["deaf"]
    assert list(report.dropped) == ["deaf"]
