"""The buffer with payloads in files: every group arrives or is rolled again, and no file is left over.

Workers and learners are processes that are killed between any two changes. Afterwards every reference in Redis must have its
file, and after a sweep no file may be without a reference.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from pydantic import TypeAdapter

from async_rl.durable import failpoints
from async_rl.errors import FleetMismatch
from async_rl.payloads.codec import decode
from async_rl.types import BufferPosition, RolloutGroup, Ticket
from buffer import keys
from buffer.payloads.files import PayloadFolder, is_reference
from buffer.redis_buffer import RedisBuffer
from buffer.server.client import Server
from buffer.server.embedded.programs import find_binary
from tests.support.groups import group
from tests.support.private_server import private_server
from tests.support.runs import publish, started
from tests.support.warm_processes import CONTEXT

LEASE_S = 1.0
MIB = 2**20


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with private_server(find_binary()) as url:
        yield url


def big(ticket: Ticket) -> RolloutGroup:
    """A group of about 150 kB."""
    return group(ticket, versions=(ticket.version,) * 8000)


@asynccontextmanager
async def opened(url: str, run: str, folder: Path | None, *, max_bytes: int = 64 * MIB) -> AsyncIterator[RedisBuffer]:
    server = Server(url, patience_s=100)
    try:
        if folder is None:
            yield RedisBuffer(server, run, learner_lease_s=LEASE_S)
        else:
            with PayloadFolder(folder, max_bytes=max_bytes) as payload_folder:
                yield RedisBuffer(server, run, learner_lease_s=LEASE_S, payload_folder=payload_folder)
    finally:
        await server.close()


async def stored(url: str, hash_key: str) -> dict[str, bytes]:
    server = Server(url, patience_s=100)
    found = await cast("Any", server.commands).hgetall(hash_key)
    await server.close()
    return {ticket.decode(): payload for ticket, payload in found.items()}


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("t"))


async def committed(buffer: RedisBuffer, count: int, make: Callable[[Ticket], RolloutGroup] = big) -> list[str]:
    version = (await buffer.stats()).version
    tickets = await buffer.reserve("w", version=version, count=count, wait_s=0)
    for ticket in tickets:
        assert await buffer.commit("w", make(ticket)) == "stored"
    return [ticket.id for ticket in tickets]


async def test_a_group_travels_through_a_file_that_goes_with_it(url: str, run_name: str, tmp_path: Path):
    async with opened(url, run_name, tmp_path / "f") as worker, opened(url, run_name, tmp_path / "f") as learner:
        fence = await started(learner)
        ids = await committed(worker, 2)
        assert [name.partition("-")[0] for name in files(tmp_path / "f")] == ids
        assert all(
            is_reference(payload) and len(payload) < 100
            for payload in (await stored(url, keys.key(run_name, "payloads"))).values()
        )
        batch = await learner.take(fence, step=1, version=0, num_groups=2, wait_s=0)
        await learner.sweep()
        assert len(files(tmp_path / "f")) == 2
        await learner.release(fence, 1)
        await learner.checkpoint(fence, 1)
        assert files(tmp_path / "f") == []
        for entry in batch:  # still readable, though its file is deleted
            [row, _] = [rollout.samples[0] for rollout in entry.group.rollouts]
            np.testing.assert_array_equal(row.token_ids, np.arange(8002))
            assert not row.logprobs.flags.writeable
        assert (await learner.audit()).is_clean


async def test_small_groups_stay_in_redis(url: str, run_name: str, tmp_path: Path):
    async with opened(url, run_name, tmp_path / "f") as buffer:
        fence = await started(buffer)
        await committed(buffer, 2, group)
        assert files(tmp_path / "f") == []
        assert len(await buffer.take(fence, step=1, version=0, num_groups=2, wait_s=0)) == 2


async def test_files_of_tickets_that_end_otherwise_are_swept(url: str, run_name: str, tmp_path: Path):
    """A refused, repeated or foreign commit, a stale group: however a ticket ends, its files are deleted."""
    async with opened(url, run_name, tmp_path / "f") as buffer:
        fence = await started(buffer, max_age=0, groups_per_step=4)
        lost, foreign, twice, stale = await buffer.reserve("w", version=0, count=4, wait_s=0)
        await buffer.abandon("w", lost.id, "abandoned")
        assert await buffer.commit("w", big(lost)) == "lease_lost"
        assert await buffer.commit("other", big(foreign)) == "lease_lost"
        assert [await buffer.commit("w", big(twice)) for _ in range(2)] == ["stored", "already"]
        assert await buffer.commit("w", big(stale)) == "stored"
        assert len(files(tmp_path / "f")) == 5
        assert await buffer.sweep() == 2
        assert len(files(tmp_path / "f")) == 3, "a reserved ticket's files may still be committed"
        assert await buffer.take(fence, step=1, version=9, num_groups=1, wait_s=0) == []
        await buffer.abandon("w", foreign.id, "failed")
        assert await buffer.sweep() == 3
        assert files(tmp_path / "f") == []


async def test_a_quarantined_group_keeps_its_file_until_it_is_forgotten(url: str, run_name: str, tmp_path: Path):
    async with opened(url, run_name, tmp_path / "f") as buffer:
        fence = await started(buffer)
        [ticket] = await buffer.reserve("w", version=0, count=1, wait_s=0)
        assert await buffer.commit("w", group(ticket, versions=(5,) * 8000)) == "quarantined"
        assert await buffer.sweep() == 0
        assert "above the live version" in await buffer.readmit(ticket.id)
        payload = await buffer.quarantined_payload(ticket.id)
        assert payload is not None
        assert decode(payload).id == ticket.id
        for version in range(5):
            assert await publish(buffer, fence, after=version) == version + 1
        assert await buffer.readmit(ticket.id) == "stored"
        assert await buffer.sweep() == 0
        [taken] = await buffer.take(fence, step=1, version=5, num_groups=1, wait_s=0)
        assert taken.group.id == ticket.id
        await buffer.checkpoint(fence, 1)
        assert files(tmp_path / "f") == []

        [bad] = await buffer.reserve("w", version=5, count=1, wait_s=0)
        assert await buffer.commit("w", group(bad, versions=(9,) * 8000)) == "quarantined"
        assert await buffer.forget([bad.id]) == 1
        assert await buffer.sweep() == 1


async def test_retained_groups_keep_their_files_until_they_are_discarded(url: str, run_name: str, tmp_path: Path):
    async with opened(url, run_name, tmp_path / "f") as buffer:
        fence = await started(buffer, keep_steps=3)
        ids = await committed(buffer, 2)
        await buffer.take(fence, step=1, version=0, num_groups=2, wait_s=0)
        await buffer.checkpoint(fence, 1)
        assert [decode(spent.payload).id for spent in await buffer.spent_groups(9)] == ids
        await buffer.discard(fence, ids[:1])
        assert [name.partition("-")[0] for name in files(tmp_path / "f")] == ids[1:]


@pytest.mark.parametrize("damage", ["gone", "zeroed", "shorter"])
async def test_a_group_whose_bytes_are_damaged_is_replaced(url: str, run_name: str, tmp_path: Path, damage: str):
    folder = tmp_path / "f"
    async with opened(url, run_name, folder) as buffer:
        fence = await started(buffer)
        ids = await committed(buffer, 3)
        first = folder / files(folder)[0]
        content = first.read_bytes()
        first.unlink()
        if damage != "gone":
            first.write_bytes(bytes(len(content)) if damage == "zeroed" else content[:-1])
        batch = await buffer.take(fence, step=1, version=0, num_groups=2, wait_s=0)
        assert [entry.group.id for entry in batch] == ids[1:]
        [report] = await buffer.quarantined()
        assert report["ticket"] == ids[0]
        [again] = await buffer.reserve("w", version=0, count=1, wait_s=0)
        assert (again.task_index, again.attempt) == (0, 2)


@pytest.mark.parametrize("folder", [None, "other"])
async def test_a_learner_that_does_not_see_the_folder_says_so(url: str, run_name: str, tmp_path: Path, folder: str | None):
    async with opened(url, run_name, tmp_path / "f") as worker:
        await started(worker)
        await committed(worker, 2)
        async with opened(url, run_name, tmp_path / folder if folder else None) as learner:
            fence = await started(learner)
            assert await learner.take(fence, step=1, version=0, num_groups=2, wait_s=0) == []
            reports = await learner.quarantined()
            assert len(reports) == 2
            assert all(("redis.payloads" if folder is None else "of this machine") in report["reason"] for report in reports)
            with pytest.raises(FleetMismatch, match=r"redis\.payloads.*set it to redis"):
                await worker.reserve("w", version=(await worker.stats()).version, count=1, wait_s=0)


async def test_workers_wait_for_room_and_lose_nothing(
    url: str, run_name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    folder, most, groups = tmp_path / "f", 5 * 150_000, 24
    async with opened(url, run_name, folder, max_bytes=most) as worker, opened(url, run_name, folder) as learner:
        fence = await started(learner, groups_per_step=groups)

        async def work() -> None:
            assert len(await committed(worker, groups)) == groups

        async with asyncio.TaskGroup() as tasks:
            working = tasks.create_task(work())
            step, trained = 0, 0
            while not working.done() or trained < groups:
                batch = await learner.take(fence, step=step + 1, version=0, num_groups=2, wait_s=0.2, patient=False)
                if batch:
                    step, trained = step + 1, trained + len(batch)
                    assert sum(path.stat().st_size for path in folder.iterdir()) <= most
                    await learner.release(fence, step)
                    await learner.checkpoint(fence, step)
        assert trained == groups
        assert "waits for a checkpoint to free room" in caplog.text
        assert files(folder) == []


async def test_sweeping_at_any_moment_takes_nothing_that_is_needed(url: str, run_name: str, tmp_path: Path):
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    folder, steps = tmp_path / "f", 20
    async with opened(url, run_name, folder) as buffer, opened(url, run_name, folder) as sweeper:
        fence = await started(buffer, groups_per_step=4, max_age=3)

        async def sweep() -> None:
            while True:
                await sweeper.sweep()
                await asyncio.sleep(0)  # an empty folder is swept without waiting for anything

        async def work(name: str) -> None:
            while True:
                for ticket in await buffer.reserve(name, version=(await buffer.stats()).version, count=3, wait_s=0.5):
                    match draw.randrange(8):
                        case 0:
                            await buffer.abandon(name, ticket.id, "abandoned")
                        case 1:
                            committing = asyncio.create_task(buffer.commit(name, big(ticket)))
                            await asyncio.sleep(0)
                            committing.cancel()
                            await asyncio.wait([committing])
                            await buffer.commit(name, big(ticket))
                        case _:
                            await buffer.commit(name, big(ticket))

        async with asyncio.TaskGroup() as tasks:
            beside = [tasks.create_task(sweep()), *(tasks.create_task(work(f"w{number}")) for number in range(3))]
            version = 0
            for step in range(1, steps + 1):
                assert len(await buffer.take(fence, step=step, version=version, num_groups=4, wait_s=30)) == 4
                version = await publish(buffer, fence)
                await buffer.release(fence, step)
                if draw.randrange(3) == 0:
                    await buffer.checkpoint(fence, step)
            for task in beside:
                task.cancel()
        assert (await buffer.stats()).quarantined == 0
        await _nothing_is_missing_and_nothing_too_much(url, run_name, folder)


async def _nothing_is_missing_and_nothing_too_much(url: str, run: str, folder: Path) -> None:
    async with opened(url, run, folder) as buffer:
        audit = await buffer.audit()
        assert audit.is_clean, audit.problems
        leased = await stored(url, keys.key(run, "records"))
        for ticket, record in leased.items():
            if record.startswith(b"reserved "):
                await buffer.abandon(record.split(b"\t")[0].split()[-1].decode(), ticket, "abandoned")
        await buffer.sweep()
        references = await stored(url, keys.key(run, "payloads"))
        with PayloadFolder(folder, max_bytes=MIB) as payload_folder:
            for ticket, found in references.items():
                assert decode(payload_folder.get(found)).id == ticket
            assert len(payload_folder.names()) == len(references)


# -- kill -9 ----------------------------------------------------------------------------------------------------------
GROUPS_PER_STEP = 4
WORKER_DIES_AT = [
    "payload_file.created:2",
    "payload_file.written:1",
    "payload_file.written:3",
    "commit.before:2",
    "commit.after:2",
]
LEARNER_DIES_AT = ["acquire.after:1", "take.after:3", "unwanted.before:1", "unwanted.after:1", "checkpoint.after:1"]


def _worker(url: str, run: str, folder: Path, order: str) -> None:
    """Run a worker; without a failpoint it works until it is killed."""
    failpoints.arm(order)
    asyncio.run(_work(url, run, folder, order if order else "steady"))


async def _work(url: str, run: str, folder: Path, name: str) -> None:
    async with opened(url, run, folder) as buffer:
        while True:
            version = (await buffer.stats()).version
            for ticket in await buffer.reserve(name, version=version, count=2, wait_s=0.5):
                await buffer.commit(name, big(ticket))


def _learner(url: str, run: str, folder: Path, order: str, book: Path, enough: Event) -> None:
    failpoints.arm(order)
    asyncio.run(_learn(url, run, folder, book, enough))


async def _learn(url: str, run: str, folder: Path, book: Path, enough: Event) -> None:
    """Every second step is saved to `book`, from which a successor resumes: a position, and what was trained."""
    async with opened(url, run, folder) as buffer:
        position, trained = _read_book(book)
        fence = await started(buffer, position, groups_per_step=GROUPS_PER_STEP, lease_s=LEASE_S, max_attempts=99)
        version = (await buffer.stats()).version
        step, held = position.step if position is not None else 0, list[object]()
        while step % 2 or not enough.is_set():
            step += 1
            batch = await buffer.take(fence, step=step, version=version, num_groups=GROUPS_PER_STEP, wait_s=60)
            trained += [entry.group.id for entry in batch]
            held = [batch, *held[:3]]
            version = await publish(buffer, fence)
            await buffer.release(fence, step)
            if step % 2 == 0:
                _write_book(book, await buffer.position(fence, step), trained)
                await buffer.checkpoint(fence, step)
        await buffer.resign(fence)


def _write_book(book: Path, position: BufferPosition, trained: list[str]) -> None:
    draft = book.with_suffix(".draft")
    draft.write_text(json.dumps([asdict(position), trained]))
    draft.replace(book)


def _read_book(book: Path) -> tuple[BufferPosition | None, list[str]]:
    if not book.exists():
        return None, []
    position, trained = json.loads(book.read_text())
    return TypeAdapter(BufferPosition).validate_python(position), trained


async def _ended(process: BaseProcess) -> int | None:
    await asyncio.to_thread(process.join)
    return process.exitcode


async def test_workers_killed_anywhere_leave_no_file(url: str, run_name: str, tmp_path: Path):
    folder, book, enough = tmp_path / "f", tmp_path / "book", CONTEXT.Event()
    learner = CONTEXT.Process(target=_learner, args=(url, run_name, folder, "", book, enough))
    workers = [CONTEXT.Process(target=_worker, args=(url, run_name, folder, order)) for order in [*WORKER_DIES_AT, ""]]
    for process in (learner, *workers):
        process.start()
    *dying, steady = workers
    assert [await _ended(worker) for worker in dying] == [-signal.SIGKILL] * len(dying)
    enough.set()
    assert await _ended(learner) == 0
    steady.kill()
    await _ended(steady)
    await _everything_was_trained_once(url, run_name, folder, book)


async def test_learners_killed_with_maps_in_their_hands_are_succeeded(url: str, run_name: str, tmp_path: Path):
    folder, book, enough = tmp_path / "f", tmp_path / "book", CONTEXT.Event()
    worker = CONTEXT.Process(target=_worker, args=(url, run_name, folder, ""))
    worker.start()
    for order in LEARNER_DIES_AT:
        learner = CONTEXT.Process(target=_learner, args=(url, run_name, folder, order, book, enough))
        learner.start()
        assert await _ended(learner) == -signal.SIGKILL
    enough.set()
    last = CONTEXT.Process(target=_learner, args=(url, run_name, folder, "", book, enough))
    last.start()
    assert await _ended(last) == 0
    worker.kill()
    await _ended(worker)
    await _everything_was_trained_once(url, run_name, folder, book)


async def _everything_was_trained_once(url: str, run: str, folder: Path, book: Path) -> None:
    position, trained = _read_book(book)
    assert position is not None
    assert len(trained) == len(set(trained)) == position.step * GROUPS_PER_STEP > 0
    async with opened(url, run, folder) as buffer:
        stats = await buffer.stats()
        assert (stats.spent, stats.quarantined) == (len(trained), 0)
    await _nothing_is_missing_and_nothing_too_much(url, run, folder)
