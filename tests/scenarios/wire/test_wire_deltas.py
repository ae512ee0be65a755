"""Workers that hold the previous version are sent deltas: the same bits, in fewer bytes."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator

import pytest
import torch

from async_rl.config import WireConfig
from async_rl.transport.delta import compact_codec
from async_rl.transport.delta.parcel_delta import encoding_of
from async_rl.transport.digest import digest_of
from async_rl.transport.sending import push_attempt
from async_rl.transport.sending.rank_orders import SendParcel
from tests.scenarios.wire.test_wire import Worker, all_needy, deliver, running
from tests.support.wire_board import StageBoard, board_of
from tests.support.wire_weights import Sender, Weights, sending

WIRE = WireConfig(shared_memory=False, deltas="always", bucket_mb=1.0)


@pytest.fixture(autouse=True, params=["compact", "parallel"])
def encoding(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """`parallel` is what a GPU's memory would have: without numba it is that of host memory too."""
    if request.param == "parallel":
        monkeypatch.setitem(sys.modules, "numba", None)  # as if it were not installed
    elif not compact_codec.is_available():
        pytest.skip("needs the extra `delta`")
    else:
        compact_codec.warm_up("bfloat16")  # otherwise dozens of versions would be pushed before the first delta
    assert encoding_of(torch.device("cpu")) == request.param


@pytest.fixture
async def board(redis_server: str, run_name: str) -> AsyncIterator[StageBoard]:
    async with board_of(redis_server, run_name) as board:
        yield board


def policy(seed: int) -> Weights:
    """Mostly bfloat16, with tensors in between that have no deltas."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "embedding": torch.randn(3000, 1024, generator=generator).bfloat16(),
        "steps": torch.randint(1 << 40, (300,), generator=generator),
        "layer": torch.randn(1500, 1111, generator=generator).bfloat16(),
        "norm": torch.ones(64).bfloat16(),
    }


def trained(before: Weights, seed: int) -> Weights:
    """As an update leaves it: one weight in a hundred changes, and so do the step counts."""
    generator = torch.Generator().manual_seed(seed)
    after = {name: tensor.clone() for name, tensor in before.items()}
    for name in ("embedding", "layer"):
        changed = torch.rand(after[name].shape, generator=generator) < 0.01
        after[name][changed] *= 1.01
    after["steps"] += 1
    return after


class Training:
    """A learner whose weights change a little with every version, and workers that follow it."""

    def __init__(self, sender: Sender, *workers: Worker) -> None:
        self._sender, self._workers = sender, workers
        self.version, self.weights = 1, policy(1)

    async def go_on(self) -> None:
        report = await self._sender.push(self.version, self.weights)
        assert set(report.staged) == {worker.name for worker in self._workers}
        await self.all_serve()
        self.learn()

    async def all_serve(self) -> None:
        await self._sender.flip(self.version)
        for worker in self._workers:
            await worker.serves(self.version)
            assert worker.served[-1] == (self.version, digest_of(self.weights))

    def learn(self) -> None:
        self.version += 1
        self.weights = trained(self.weights, seed=self.version)

    async def until_differences(self, count: int) -> None:
        """Both ends must have compiled what they need."""
        while self._sender.rank_sender.num_deltas < count:
            await self.go_on()


async def test_deltas_give_the_same_bits(board: StageBoard) -> None:
    workers = [Worker(board, f"w{number}", policy(0), WIRE) for number in range(2)]
    async with running(*workers), sending(board, WIRE, policy(0)) as sender:
        await all_needy(sender, 1, *workers)
        await Training(sender, *workers).until_differences(3)
        assert sender.rank_sender.num_deltas == 3
    assert workers[0].served == workers[1].served


async def test_a_member_without_the_base_makes_its_group_receive_whole_parcels(board: StageBoard) -> None:
    first, late = (Worker(board, name, policy(0), WIRE) for name in ("first", "late"))
    async with running(first), sending(board, WIRE, policy(0)) as sender:
        await all_needy(sender, 1, first)
        alone = Training(sender, first)
        await alone.until_differences(1)
        async with running(late):
            await all_needy(sender, alone.version, first, late)
            report = await sender.push(alone.version, alone.weights)
            assert set(report.staged) == {"first", "late"}
            await alone.all_serve()
            await late.serves(alone.version)
            assert sender.rank_sender.num_deltas == 1
    assert late.served[-1] == first.served[-1]


async def test_a_damaged_delta_is_never_served_and_the_parcel_is_sent_again_whole(board: StageBoard) -> None:
    worker = Worker(board, "w", policy(0), WIRE)
    async with running(worker), sending(board, WIRE, policy(0)) as sender:
        await all_needy(sender, 1, worker)
        training = Training(sender, worker)
        await training.until_differences(1)
        sender.flip_a_bit(training.version - 1)  # of what the difference is made to: it will not fit what the worker holds
        assert "digest" in (await sender.push(training.version, training.weights)).dropped["w"]
        await sender.flip(training.version)
        assert await sender.wait_for_members_behind(training.version) == ["w"], "it asks for what it lacks"
        await deliver(sender, training.version, training.weights, worker)
        await training.all_serve()
    assert [version for version, _ in worker.served] == [*range(1, training.version + 1)]


async def test_a_rank_with_another_encoding_than_rank_0_sends_whole_parcels(
    board: StageBoard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where only some machines of a learner have numba. Workers know rank 0's encoding."""
    worker = Worker(board, "w", policy(0), WIRE)
    async with running(worker), sending(board, WIRE, policy(0)) as sender:
        await all_needy(sender, 1, worker)
        training = Training(sender, worker)
        await training.until_differences(1)
        of_rank_0 = "compact" if sender.rank_sender.deltas == "parallel" else "parallel"
        monkeypatch.setattr(push_attempt, "SendParcel", lambda **order: SendParcel(**order | {"deltas": of_rank_0}))
        await training.go_on()
        assert sender.rank_sender.num_deltas == 1
