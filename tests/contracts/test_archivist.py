"""Spent groups reach the archive exactly once, whichever process dies on the way, and training never waits for a disk."""

from __future__ import annotations

import asyncio
import logging
import random
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from async_rl.durable import failpoints
from async_rl.errors import FenceLost
from async_rl.replay_protocol import ReplayBuffer
from async_rl.types import SpentGroup
from buffer.archive import service
from buffer.archive.reading import archive_stats, read
from buffer.archive.service import archive_spent, drain_spent
from buffer.archive.writing import ArchiveWriter
from buffer.redis_buffer import RedisBuffer
from buffer.server.client import Server
from tests.contracts import archiving_process
from tests.support.groups import group
from tests.support.runs import Run, limits, started
from tests.support.warm_processes import CONTEXT

PER_STEP = 20
KEEP = {"groups_per_step": PER_STEP, "max_age": 1, "keep_steps": 1000}


def writer(folder: Path, **changed) -> ArchiveWriter:
    return ArchiveWriter(folder, **({"run": "r", "max_gb": 1.0} | changed))


async def trained(buffer: ReplayBuffer, fence: int, *steps: int) -> list[str]:
    """Groups that a checkpoint of the last of these steps has spent, as they will be archived."""
    spent: list[str] = []
    for step in steps:
        for ticket in await buffer.reserve("w", version=(await buffer.stats()).version, count=PER_STEP, wait_s=0):
            assert await buffer.commit("w", group(ticket)) == "stored"
        batch = await buffer.take(fence, step=step, version=0, num_groups=PER_STEP, wait_s=0)
        spent += sorted(entry.group.id for entry in batch)
        await buffer.release(fence, step)
    await buffer.checkpoint(fence, steps[-1])
    return spent


def archived(folder: Path) -> list[str]:
    return [entry.id for _, entry in read(folder)]


@asynccontextmanager
async def beside(serving) -> AsyncIterator[asyncio.Task]:
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(serving)
        yield task
        task.cancel()


class Gate:
    """A writer that reports its calls, and fails or waits on demand."""

    def __init__(self, writer: ArchiveWriter) -> None:
        self._writer, self._loop = writer, asyncio.get_running_loop()
        self.failures = 0
        self.tries: asyncio.Queue[int] = asyncio.Queue()

    def append(self, groups: Sequence[SpentGroup]) -> int:
        try:
            if self.failures:
                self.failures -= 1
                raise OSError(28, "No space left on device")
            return self._writer.append(groups)
        finally:
            self._loop.call_soon_threadsafe(self.tries.put_nowait, len(groups))


class Watched:
    """A buffer that reports when it had nothing left to archive."""

    def __init__(self, buffer: ReplayBuffer) -> None:
        self._buffer = buffer
        self.was_empty = asyncio.Event()

    async def spent_groups(self, limit: int) -> list[SpentGroup]:
        groups = await self._buffer.spent_groups(limit)
        if not groups:
            self.was_empty.set()
        return groups

    async def discard(self, fence: int, groups: Sequence[str]) -> None:
        await self._buffer.discard(fence, groups)


# -- the service --------------------------------------------------------------------------------------------------------
async def test_spent_groups_leave_the_buffer_for_the_archive_at_each_checkpoint(run: Run, tmp_path: Path):
    buffer, fence = await run.start(**KEEP)
    spent, wake = await trained(buffer, fence, 1, 2), asyncio.Event()
    watched = Watched(buffer)
    with writer(tmp_path) as disk:
        async with beside(archive_spent(watched, fence, disk, wake=wake)):
            await watched.was_empty.wait()
            assert archived(tmp_path) == spent
            spent += await trained(buffer, fence, 3)
            assert len(await buffer.spent_groups(100)) == PER_STEP
            watched.was_empty.clear()
            wake.set()
            await watched.was_empty.wait()
    assert archived(tmp_path) == spent
    audit = await buffer.audit()
    assert audit.problems == ()


async def test_the_payload_is_archived_as_the_buffer_held_it(run: Run, tmp_path: Path):
    buffer, fence = await run.start(**KEEP)
    await trained(buffer, fence, 1)
    (held, *_) = await buffer.spent_groups(1)
    with writer(tmp_path) as disk:
        assert await drain_spent(buffer, fence, disk, within_s=30)
    assert held.payload in (tmp_path / "groups-000001.arl").read_bytes()


async def test_a_learner_that_was_replaced_discards_nothing(run: Run, tmp_path: Path):
    buffer, fence = await run.start(**KEEP)
    await trained(buffer, fence, 1)
    await buffer.resign(fence)
    successor = await run.open()
    later = await successor.acquire("successor", limits(**KEEP))
    with writer(tmp_path) as late, pytest.raises(FenceLost):
        await archive_spent(buffer, fence, late, wake=asyncio.Event())
    assert len(await successor.spent_groups(100)) == PER_STEP
    with writer(tmp_path) as disk:
        assert await drain_spent(successor, later, disk, within_s=30)
    assert archive_stats(tmp_path).groups == PER_STEP
    assert archive_stats(tmp_path).files == 1


async def test_a_disk_that_refuses_is_told_once_and_tried_again(
    run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(service, "LONGEST_PAUSE_S", 600.0)
    monkeypatch.setattr(service, "FIRST_PAUSE_S", 600.0)
    buffer, fence = await run.start(**KEEP)
    spent, wake = await trained(buffer, fence, 1), asyncio.Event()
    watched = Watched(buffer)
    caplog.set_level(logging.INFO, logger="buffer.archive.service")
    with writer(tmp_path) as disk:
        gate = Gate(disk)
        gate.failures = 3
        async with beside(archive_spent(watched, fence, gate, wake=wake)):
            for _ in range(3):  # a checkpoint makes it try at once
                await gate.tries.get()
                assert len(await buffer.spent_groups(100)) == PER_STEP
                wake.set()
            await watched.was_empty.wait()
    assert archived(tmp_path) == spent
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "No space left on device" in warnings[0]
    assert "written again" in caplog.text


async def test_a_disk_that_recovers_is_found_without_a_checkpoint(run: Run, tmp_path: Path):
    buffer, fence = await run.start(**KEEP)
    await trained(buffer, fence, 1)
    watched = Watched(buffer)
    with writer(tmp_path) as disk:
        gate = Gate(disk)
        gate.failures = 1
        async with beside(archive_spent(watched, fence, gate, wake=asyncio.Event())):
            await watched.was_empty.wait()
    assert archive_stats(tmp_path).groups == PER_STEP


async def test_training_goes_on_while_the_disk_refuses_and_the_buffer_stays_bounded(run: Run, tmp_path: Path):
    buffer, fence = await run.start(**KEEP | {"keep_steps": 2})
    with writer(tmp_path) as disk:
        gate, wake, watched = Gate(disk), asyncio.Event(), Watched(buffer)
        gate.failures = 1000
        async with beside(archive_spent(watched, fence, gate, wake=wake)):
            last: list[str] = []
            for step in range(1, 8):
                last = (last + await trained(buffer, fence, step))[-2 * PER_STEP :]
                wake.set()
                await gate.tries.get()
            assert [entry.id for entry in await buffer.spent_groups(1000)] == last
            gate.failures = 0
            watched.was_empty.clear()
            wake.set()
            await watched.was_empty.wait()
    assert archived(tmp_path) == last


async def test_what_is_left_at_the_end_is_archived_within_a_deadline(run: Run, tmp_path: Path):
    buffer, fence = await run.start(**KEEP)
    with writer(tmp_path) as disk:
        async with beside(archive_spent(buffer, fence, disk, wake=asyncio.Event())):
            pass
        spent = await trained(buffer, fence, 1, 2, 3)
        assert not await drain_spent(buffer, fence, disk, within_s=0)
        gate = Gate(disk)
        gate.failures = 1
        assert not await drain_spent(buffer, fence, gate, within_s=30)
        assert await drain_spent(buffer, fence, disk, within_s=30)
    assert archived(tmp_path) == spent


async def test_a_cancelled_service_leaves_no_write_behind(tmp_path: Path):
    """The next writer must not overlap with the cancelled one."""
    begun, ended = asyncio.Event(), []
    loop = asyncio.get_running_loop()

    class Slow:
        def append(self, groups: Sequence[SpentGroup]) -> int:
            loop.call_soon_threadsafe(begun.set)
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0.1), loop).result()
            ended.append(len(groups))
            return len(groups)

    class Buffer:
        async def spent_groups(self, limit: int) -> list[SpentGroup]:
            return [SpentGroup(id="a", step=1, payload=b"")]

        async def discard(self, fence: int, ids: Sequence[str]) -> None:
            pytest.fail("a cancelled service discards nothing")

    async with asyncio.TaskGroup() as tasks:
        service = tasks.create_task(archive_spent(Buffer(), 1, Slow(), wake=asyncio.Event()))
        await begun.wait()
        service.cancel()
        await asyncio.wait([service])
        assert ended == [1]


# -- kill -9 ------------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def child(
    url: str, run_name: str, fence: int, folder: Path, failpoint: str = ""
) -> AsyncIterator[tuple[BaseProcess, Event]]:
    """A process that archives, and what is set when it begins."""
    begun = CONTEXT.Event()
    process = CONTEXT.Process(target=archiving_process.play, args=(url, run_name, fence, folder, failpoint, begun))
    process.start()
    try:
        yield process, begun
    finally:
        process.kill()
        await asyncio.to_thread(process.join)


POINTS = sorted(name for name in failpoints.known() if name.startswith("archive.") and name != "archive.removed")


@pytest.mark.parametrize("point", POINTS)
async def test_a_writer_that_dies_at_any_point_loses_and_doubles_nothing(
    redis_buffer: tuple[RedisBuffer, Server], redis_server: str, run_name: str, tmp_path: Path, point: str
):
    assert len(POINTS) >= 6
    buffer, _ = redis_buffer
    fence = await started(buffer, **KEEP)
    spent = await trained(buffer, fence, 1, 2, 3)
    for count in (1, 2):
        async with child(redis_server, run_name, fence, tmp_path, f"{point}:{count}") as (process, _):
            await asyncio.to_thread(process.join)
            assert process.exitcode in (-signal.SIGKILL, 0)
    await archiving_process.main(redis_server, run_name, fence, tmp_path)
    assert archived(tmp_path) == spent
    stats = archive_stats(tmp_path)
    assert (stats.groups, stats.damaged) == (len(spent), 0)
    assert records_in(tmp_path) == len(spent)
    assert await buffer.spent_groups(1) == []


async def test_a_writer_that_is_killed_at_random_loses_and_doubles_nothing(
    redis_buffer: tuple[RedisBuffer, Server], redis_server: str, run_name: str, tmp_path: Path
):
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    buffer, _ = redis_buffer
    fence = await started(buffer, **KEEP)
    spent: list[str] = []
    for life in range(4):
        spent += await trained(buffer, fence, 2 * life + 1, 2 * life + 2)
        async with child(redis_server, run_name, fence, tmp_path) as (_, begun):
            assert await asyncio.to_thread(begun.wait, 60)
            await asyncio.sleep(draw.uniform(0, 0.05))
    await archiving_process.main(redis_server, run_name, fence, tmp_path)
    assert archived(tmp_path) == spent
    assert archive_stats(tmp_path).damaged == 0
    assert records_in(tmp_path) == len(spent)


def records_in(folder: Path) -> int:
    """All ids in the archive, duplicates included."""
    return sum(path.read_bytes().count(b"ARLR") for path in folder.glob("*.arl"))
