"""Workers that hold the version before get the difference to it: the same bits, in fewer bytes."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import torch
from test_wire import Worker, all_needy, running
from wire_board import board_of
from wire_weights import Weights, sending

from async_rl.config import WireConfig
from async_rl.supervision.daemon_thread import in_daemon_thread
from async_rl.transport import delta
from async_rl.transport.digest import digest_of
from buffer.board import RedisBoard

pytestmark = pytest.mark.skipif(not delta.is_available(), reason="needs the extra `delta`")
WIRE = WireConfig(shared_memory=False, deltas="always", bucket_mb=1.0)


@pytest.fixture
async def board(redis_server: str, run_name: str) -> AsyncIterator[RedisBoard]:
    async with board_of(redis_server, run_name) as board:
        yield board


def policy(seed: int) -> Weights:
    """Mostly bfloat16, with numbers between that no difference is made of."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "embedding": torch.randn(3000, 1024, generator=generator).bfloat16(),
        "steps": torch.randint(1 << 40, (300,), generator=generator),
        "layer": torch.randn(1500, 1111, generator=generator).bfloat16(),
        "norm": torch.ones(64).bfloat16(),
    }


def trained(before: Weights, seed: int) -> Weights:
    """As an update leaves it: one weight in a hundred is another, and the step counts are."""
    generator = torch.Generator().manual_seed(seed)
    after = {name: tensor.clone() for name, tensor in before.items()}
    for name in ("embedding", "layer"):
        changed = torch.rand(after[name].shape, generator=generator) < 0.01
        after[name][changed] *= 1.01
    after["steps"] += 1
    return after


async def test_differences_bring_the_same_bits(board: RedisBoard) -> None:
    await in_daemon_thread(lambda: delta.warm_up("bfloat16"), name="warm-up")
    workers = [Worker(board, f"w{number}", policy(0), WIRE) for number in range(2)]
    versions = {1: policy(1)}
    async with running(*workers), sending(board, WIRE, policy(0)) as sender:
        await all_needy(sender, 1, *workers)
        number = 1
        while sender.depot.num_differences < 3:  # as soon as both ends have compiled what they need
            report = await sender.push(number, versions[number])
            assert set(report.staged) == {"w0", "w1"}
            await sender.flip(number)
            for worker in workers:
                await worker.serves(number)
                assert worker.served[-1] == (number, digest_of(versions[number]))
            number += 1
            versions[number] = trained(versions[number - 1], seed=number)


async def test_one_that_holds_nothing_makes_everybody_get_it_whole(board: RedisBoard) -> None:
    await in_daemon_thread(lambda: delta.warm_up("bfloat16"), name="warm-up")
    first, late = (Worker(board, name, policy(0), WIRE) for name in ("first", "late"))
    versions = {1: policy(1)}
    async with running(first), sending(board, WIRE, policy(0)) as sender:
        await all_needy(sender, 1, first)
        number = 1
        while sender.depot.num_differences < 1:
            await sender.push(number, versions[number])
            await sender.flip(number)
            await first.serves(number)
            number += 1
            versions[number] = trained(versions[number - 1], seed=number)
        async with running(late):
            await all_needy(sender, number, first, late)
            report = await sender.push(number, versions[number])
            assert set(report.staged) == {"first", "late"}
            await sender.flip(number)
            for worker in (first, late):
                await worker.serves(number)
                assert worker.served[-1] == (number, digest_of(versions[number]))
            assert sender.depot.num_differences == 1


async def test_a_difference_that_is_damaged_is_never_served_and_comes_again_whole(board: RedisBoard) -> None:
    await in_daemon_thread(lambda: delta.warm_up("bfloat16"), name="warm-up")
    worker = Worker(board, "w", policy(0), WIRE)
    versions = {1: policy(1)}
    async with running(worker), sending(board, WIRE, policy(0)) as sender:
        await all_needy(sender, 1, worker)
        number = 1
        while sender.depot.num_differences < 1:
            await sender.push(number, versions[number])
            await sender.flip(number)
            await worker.serves(number)
            number += 1
            versions[number] = trained(versions[number - 1], seed=number)
        sender.flip_a_bit(number - 1)  # of what the difference is made to: it will not fit what the worker holds
        assert "digest" in (await sender.push(number, versions[number])).dropped["w"]
        await sender.flip(number)
        assert await sender.needed(number) == ["w"], "it asks for what it lacks"
        assert (await sender.push(number, versions[number])).staged == ("w",)
        await sender.flip(number)
        await worker.serves(number)
        assert worker.served[-1] == (number, digest_of(versions[number]))
        assert [version for version, _ in worker.served] == [*range(1, number + 1)]
