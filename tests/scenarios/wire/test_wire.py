"""The weight wire with sender and receivers in one process: what is served, and what never is."""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from async_rl.board.inbox import Inbox
from async_rl.config import WireConfig
from async_rl.errors import FleetMismatch, ServiceStopped, WireError, find_async_rl_error
from async_rl.protocols import Member
from async_rl.transport.digest import digest_of, specs_of
from async_rl.transport.messages import (
    TO_LEARNER,
    TO_LEARNER_MESSAGES,
    TO_WORKERS,
    Backend,
    PushBegin,
    PushFailed,
    PushOffer,
    PushReady,
    VersionLive,
)
from async_rl.transport.packed_source import PACKED_NOTE
from async_rl.transport.receiving.catch_up import CatchUp
from async_rl.transport.receiving.receiver import WeightReceiver
from async_rl.transport.sending import push_attempt, rank_sender
from async_rl.types import VersionRecord
from tests.support import wire_weights
from tests.support.waiting import eventually
from tests.support.wire_board import StageBoard, board_of, go_live
from tests.support.wire_weights import Sender, all_behind, sending

weights = partial(wire_weights.weights, rows=800)
"""A dozen buckets."""


class Worker:
    """An engine that keeps a note of every version handed to it."""

    def __init__(
        self,
        board: StageBoard,
        name: str,
        tensors: Mapping[str, torch.Tensor],
        wire: WireConfig,
        snapshots: Path | None = None,
        gpus: tuple[str, ...] = (),
    ) -> None:
        self.name = name
        self.served: list[tuple[int, str]] = []
        member = Member(id=name, host="localhost", version=-1, device="cpu", gpus=gpus)
        self._receiver = WeightReceiver(board, board.store, member, specs_of(tensors), wire, lease_s=10.0, snapshots=snapshots)
        self._news = asyncio.Condition()

    async def run(self) -> None:
        await self._receiver.run(self._swap)

    @property
    def parcels_kept(self) -> int:
        """Parcels whose memory it keeps for the next version."""
        return len(self._receiver._parcels._buffers)

    async def receive(self, message: PushBegin) -> None:
        """Handle a message now, instead of when it comes over the board."""
        async with asyncio.TaskGroup() as services:
            await self._receiver._on_push(message, services)

    async def serves(self, version: int) -> None:
        async with self._news:
            await self._news.wait_for(lambda: any(served == version for served, _ in self.served))

    async def serves_more(self, versions: int = 1) -> None:
        async with self._news:
            wanted = len(self.served) + versions
            await self._news.wait_for(lambda: len(self.served) >= wanted)

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


async def deliver(sender: Sender, version: int, tensors: Mapping[str, torch.Tensor], worker: Worker) -> None:
    """Push until the worker has the version: within a short timeout, or the half second that a member has which failed last
    time, a busy machine may fail. A live version may also
    be fetched by the worker itself.
    """
    while worker.name not in (await sender.push(version, tensors)).staged:
        await sender.flip(version)
        waiting = [asyncio.ensure_future(each) for each in (sender.wait_for_members_behind(version), worker.serves(version))]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for each in waiting:
            each.cancel()
        if waiting[1].done():
            return
    await sender.flip(version)
    await worker.serves(version)


async def all_needy(sender: Sender, version: int, *workers: Worker) -> None:
    await all_behind(sender, version, [worker.name for worker in workers])


@pytest.fixture
async def board(redis_server: str, run_name: str) -> AsyncIterator[StageBoard]:
    async with board_of(redis_server, run_name) as board:
        yield board


@pytest.fixture(params=["memory", "gloo"])
def wire(request: pytest.FixtureRequest) -> WireConfig:
    """In place on the same machine, and over a process group."""
    return WireConfig(
        bucket_mb=0.25, operation_timeout_s=60.0, rendezvous_timeout_s=60.0, shared_memory=request.param == "memory"
    )


async def test_all_workers_serve_the_bits_that_were_pushed(board: StageBoard, wire: WireConfig) -> None:
    workers = [Worker(board, f"w{number}", weights(0), wire) for number in range(3)]
    async with running(*workers), sending(board, wire, weights(0)) as sender:
        await all_needy(sender, 1, *workers)
        for version in (1, 2, 5):
            pushed = weights(seed=version)
            report = await sender.push(version, pushed)
            assert set(report.staged) == {"w0", "w1", "w2"}
            assert report.dropped == {}
            assert set(report.how.values()) <= ({"memory"} if wire.shared_memory else {"gloo", "gloo, delta"})
            assert set(report.how) == set(report.staged)
            assert all(len(worker.served) < version for worker in workers), "nothing is served before the flip"
            await sender.flip(version)
            for worker in workers:
                await worker.serves(version)
                assert worker.served[-1] == (version, digest_of(pushed))
    assert await board.members() == [], "a receiver that ends takes itself off the list"


async def test_all_gpus_of_learner_and_workers_are_asked_for_whether_nccl_may_take_them(
    board: StageBoard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It refuses two ranks on one GPU. There is no GPU here: the learner and the worker say that they have one."""
    asked: list[list[str]] = []

    def backend_among(gpus: Sequence[str]) -> Backend:
        asked.append(sorted(gpus))
        return "gloo"

    monkeypatch.setattr(rank_sender, "gpu_of", lambda _: "GPU-1")
    monkeypatch.setattr(push_attempt, "backend_among", backend_among)
    wire = WireConfig(shared_memory=False)
    worker = Worker(board, "w", weights(0), wire, gpus=("GPU-1", "GPU-2"))
    async with running(worker), sending(board, wire, weights(0)) as sender:
        await all_needy(sender, 1, worker)
        assert (await sender.push(1, weights(1))).staged == ("w",)
    assert asked == [["GPU-1", "GPU-1", "GPU-2"]]


async def test_a_catch_up_has_the_memory_of_the_last_version(
    board: StageBoard, redis_server: str, run_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU has no room for two."""
    wire = WireConfig(shared_memory=False, rendezvous_timeout_s=1.0)  # a failed catch-up is tried again after that time
    worker = Worker(board, "w", weights(0), wire)
    kept: list[int] = []
    fetched = asyncio.Event()
    loop = asyncio.get_running_loop()

    def fetch(*_: object) -> None:
        kept.append(worker.parcels_kept)
        loop.call_soon_threadsafe(fetched.set)
        raise WireError("not now")

    async with running(worker), sending(board, wire, weights(0)) as sender:
        await all_needy(sender, 1, worker)
        await deliver(sender, 1, weights(1), worker)
        assert worker.parcels_kept == 1
        monkeypatch.setattr(CatchUp, "fetch", fetch)
        await go_live(board, redis_server, run_name, VersionRecord(version=2, timeline="a", step=2, digest=""))
        await fetched.wait()
    assert kept[0] == 0


async def test_a_late_joiner_says_so_and_catches_up(board: StageBoard, wire: WireConfig) -> None:
    first, late = Worker(board, "first", weights(0), wire), Worker(board, "late", weights(0), wire)
    pushed = weights(seed=3)
    async with running(first), sending(board, wire, weights(0)) as sender:
        await sender.wait_for_members_behind(3)
        await sender.push(3, pushed)
        await sender.flip(3)
        await first.serves(3)
        async with running(late):
            assert await sender.wait_for_members_behind(3) == ["late"]
            report = await sender.push(3, pushed)
            assert report.staged == ("late",)
            await sender.flip(3)
            await late.serves(3)
    assert first.served == late.served == [(3, digest_of(pushed))]


async def test_a_worker_of_a_run_that_was_lost_starts_again(
    board: StageBoard, wire: WireConfig, redis_server: str, run_name: str
) -> None:
    """Redis and the run's folder were emptied together, and a new learner counts from 0: no running worker goes back."""
    worker = Worker(board, "w", weights(0), wire)
    pushed = weights(seed=5)

    async def lose_the_run() -> None:
        async with running(worker), sending(board, wire, weights(0)) as sender:
            await sender.wait_for_members_behind(5)
            await sender.push(5, pushed)
            await sender.flip(5)
            await worker.serves(5)
            await go_live(board, redis_server, run_name, VersionRecord(version=0, timeline="another", step=0, digest=""))
            await asyncio.Future()

    with pytest.raises(BaseExceptionGroup) as broken:
        await lose_the_run()
    found = find_async_rl_error(broken.value)
    assert isinstance(found, ServiceStopped)
    assert "serves version 5" in str(found)
    assert worker.served == [(5, digest_of(pushed))]


async def test_a_push_without_members_behind_sends_nothing(board: StageBoard, wire: WireConfig) -> None:
    worker = Worker(board, "w", weights(0), wire)
    pushed = weights(seed=2)
    async with running(worker), sending(board, wire, weights(0)) as sender:
        await sender.wait_for_members_behind(2)
        await sender.push(2, pushed)
        assert await sender.members_behind(2) == [], "staged is enough, served or not"
        await sender.flip(2)
        await worker.serves(2)
        older = weights(seed=1)
        for version, tensors in ((2, pushed), (1, older)):
            report = await sender.push(version, tensors)
            assert (report.staged, report.dropped) == ((), {})
            await sender.flip(version)
    assert [version for version, _ in worker.served] == [2]


async def test_weights_that_arrive_damaged_are_never_served(board: StageBoard, wire: WireConfig) -> None:
    worker = Worker(board, "w", weights(0), wire)
    async with running(worker), sending(board, wire, weights(0)) as sender:
        await sender.wait_for_members_behind(1)
        pushed = weights(seed=1)
        sender.pack(1, pushed)
        sender.flip_a_bit(1)
        report = await sender.push(1, pushed)
        assert report.staged == ()
        assert "digest" in report.dropped["w"]
        await sender.flip(1)
        assert await sender.wait_for_members_behind(1) == ["w"], "told of a version it does not hold, the worker asks for it"
        assert worker.served == []
        sender.flip_a_bit(1)
        await deliver(sender, 1, pushed, worker)
    assert worker.served == [(1, digest_of(pushed))]


async def test_staged_weights_that_never_went_live_give_way_to_the_next(board: StageBoard, wire: WireConfig) -> None:
    worker = Worker(board, "w", weights(0), wire)
    forgotten, served = weights(seed=1), weights(seed=2)
    async with running(worker), sending(board, wire, weights(0)) as sender:
        await sender.wait_for_members_behind(1)
        await sender.push(1, forgotten)
        await sender.push(2, served)
        await sender.flip(1)
        await sender.flip(2)
        await worker.serves(2)
    assert worker.served == [(2, digest_of(served))]


async def test_a_version_that_is_live_is_served_though_its_learner_died_before_the_flip(
    board: StageBoard, wire: WireConfig, redis_server: str, run_name: str
) -> None:
    worker = Worker(board, "w", weights(0), wire)
    pushed = weights(seed=1)
    async with running(worker):
        async with sending(board, wire, weights(0)) as sender:
            await sender.wait_for_members_behind(1)
            await sender.push(1, pushed)
            await go_live(board, redis_server, run_name, sender.records[1])
        await worker.serves(1)
    assert worker.served == [(1, digest_of(pushed))]


async def test_running_workers_follow_a_new_learner_and_no_longer_the_old_one(board: StageBoard, wire: WireConfig) -> None:
    wire = wire.model_copy(update={"operation_timeout_s": 2.0})
    worker = Worker(board, "w", weights(0), wire)
    old, new, stale, newest = (weights(seed=seed) for seed in (1, 2, 3, 4))
    async with running(worker), sending(board, wire, weights(0)) as first:
        await first.wait_for_members_behind(1)
        await deliver(first, 1, old, worker)
        async with sending(board, wire, weights(0), fence=2, timeline="b") as second:
            assert await second.wait_for_members_behind(2) == ["w"]
            await deliver(second, 2, new, worker)
            report = await first.push(3, stale)
            assert "did not answer" in report.dropped["w"]
            await first.flip(3)
            await deliver(second, 4, newest, worker)
    assert worker.served == [(1, digest_of(old)), (2, digest_of(new)), (4, digest_of(newest))]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"scale": torch.zeros(2)}, r"sends scale float32\[\], this model has scale float32\[2\]"),
        ({"layers.0.norm": torch.zeros(64).half()}, "this model has layers.0.norm float16"),
        ({"extra": torch.zeros(1)}, "this model has extra .* does not send"),
    ],
)
async def test_a_worker_with_another_model_is_refused_before_it_is_a_member(
    board: StageBoard, wire: WireConfig, change: dict[str, torch.Tensor], says: str
) -> None:
    pushed = weights(seed=1)
    fits, stranger = Worker(board, "fits", pushed, wire), Worker(board, "stranger", pushed | change, wire)
    async with sending(board, wire, weights(0)) as sender:
        with pytest.raises(FleetMismatch, match=says):
            raise await refusal_of(stranger)
        async with running(fits):
            assert await sender.wait_for_members_behind(1) == ["fits"]
            report = await sender.push(1, pushed)
            assert (report.staged, report.dropped) == (("fits",), {})
            await sender.flip(1)
            await fits.serves(1)
    assert stranger.served == []


async def test_a_worker_with_another_model_that_was_there_before_the_learner_is_refused_at_the_first_offer(
    board: StageBoard, wire: WireConfig
) -> None:
    pushed = weights(seed=1)
    fits, stranger = Worker(board, "fits", pushed, wire), Worker(board, "stranger", pushed | {"extra": torch.zeros(1)}, wire)
    async with running(fits), asyncio.TaskGroup() as group:
        refusing = group.create_task(refusal_of(stranger))

        async def are_members() -> bool:
            return [member.catches_up for member in await board.members()] == ["", ""]

        await eventually(are_members, "both workers are members")
        async with sending(board, wire, weights(0)) as sender:
            assert set(await sender.wait_for_members_behind(1)) == {"fits", "stranger"}
            report = await sender.push(1, pushed)
            assert report.staged == ("fits",)
            await sender.flip(1)
            await fits.serves(1)
            refusal = await refusing
    assert report.dropped["stranger"] in str(refusal)
    assert "this model has extra" in str(refusal)
    assert stranger.served == []


async def refusal_of(stranger: Worker) -> FleetMismatch:
    with pytest.raises(ExceptionGroup) as refused:
        await stranger.run()
    error = find_async_rl_error(refused.value)
    assert isinstance(error, FleetMismatch)
    return error


async def test_malformed_and_foreign_messages_change_nothing(board: StageBoard, wire: WireConfig) -> None:
    worker = Worker(board, "w", weights(0), wire)
    pushed = weights(seed=1)
    async with running(worker), sending(board, wire, weights(0)) as sender:
        await sender.wait_for_members_behind(1)
        for topic in ("weights-to-workers", "weights-to-learner"):
            for message in ({}, {"kind": "offer"}, {"kind": "nonsense", "fence": 1}, {"kind": "staged", "fence": "x"}):
                await board.post(topic, message)
        await board.post("weights-to-learner", {"kind": "staged", "fence": 1, "generation": 99, "member": "w"})
        await sender.push(1, pushed)
        forged = VersionLive(fence=1, record=replace(sender.records[1], digest="of something else"))
        await board.post("weights-to-workers", forged.model_dump(mode="json"))
        await sender.flip(1)
        await worker.serves(1)
    assert worker.served == [(1, digest_of(pushed))]


async def test_a_forged_offer_with_a_huge_fence_does_not_make_workers_ignore_the_learner(
    board: StageBoard, wire: WireConfig
) -> None:
    worker = Worker(board, "w", weights(0), wire)
    pushed, hears = weights(seed=1), await Inbox.open(board, TO_LEARNER, TO_LEARNER_MESSAGES)
    async with asyncio.timeout(60), running(worker), sending(board, wire, weights(0)) as sender:
        await sender.wait_for_members_behind(1)
        record = VersionRecord(version=99, timeline="f", step=1, digest="f")
        forged = PushOffer(fence=10**15, generation=10**15, to=("w",), record=record)
        await board.post(TO_WORKERS, forged.model_dump(mode="json"))
        await board.post(TO_WORKERS, VersionLive(fence=10**15, record=record).model_dump(mode="json"))
        assert (await sender.push(1, pushed)).staged == ("w",)
        await sender.flip(1)
        await worker.serves(1)
        said = [message for message in await hears.read() if isinstance(message, PushReady | PushFailed)]
    assert [message.fence for message in said] == [1], "the forged offer got no reply"
    assert worker.served == [(1, digest_of(pushed))]


async def test_an_address_that_is_not_ours_is_named(board: StageBoard) -> None:
    with pytest.raises(WireError, match=r"wire.host: cannot listen at '203.0.113.7'"):
        async with sending(board, WireConfig(host="203.0.113.7", insecure=True), weights(0)):
            pass


async def test_the_process_groups_of_others_are_left_alone(board: StageBoard, wire: WireConfig) -> None:
    is_ours = not torch.distributed.is_initialized()  # else an earlier test's model left one
    if is_ours:
        torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        before = torch.distributed.group.WORLD
        worker = Worker(board, "w", weights(0), wire)
        pushed = weights(seed=1)
        async with running(worker), sending(board, wire, weights(0)) as sender:
            await sender.wait_for_members_behind(1)
            assert (await sender.push(1, pushed)).staged == ("w",)
        assert torch.distributed.group.WORLD is before
        ones = torch.ones(2)
        torch.distributed.all_reduce(ones)
        assert ones.tolist() == [1, 1]
    finally:
        if is_ours:
            torch.distributed.destroy_process_group()


class Astray:
    """A board on which the learner's address cannot be reached, as behind a firewall."""

    def __init__(self, board: StageBoard) -> None:
        self._board = board

    def __getattr__(self, name: str) -> Any:
        return getattr(self._board, name)

    async def note(self, name: str) -> bytes | None:
        text = await self._board.note(name)
        if text is None or name != PACKED_NOTE:
            return text
        said = json.loads(zlib.decompress(text))
        return zlib.compress(json.dumps({**said, "host": "nowhere.invalid"}).encode())


async def test_one_that_cannot_be_reached_costs_the_others_nothing(board: StageBoard, wire: WireConfig) -> None:
    pushed = weights(seed=1)
    workers = [Worker(board, f"w{number}", pushed, wire) for number in range(3)]
    deaf = Worker(cast("StageBoard", Astray(board)), "deaf", pushed, wire)
    async with running(*workers, deaf), sending(board, wire, weights(0)) as sender:
        await all_needy(sender, 1, *workers, deaf)
        report = await sender.push(1, pushed)
    assert set(report.staged) == {"w0", "w1", "w2"}
    assert "'nowhere.invalid' is no address that this machine reaches" in report.dropped["deaf"]
    assert list(report.dropped) == ["deaf"]
