"""What the learner's recording makes of the messages of workers, whose clocks differ."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from async_rl.board.inbox import post
from async_rl.board.worker_reports import RECORDS, WorkerBlocked, WorkerRecord
from async_rl.recording import Recording, RolloutFilter
from async_rl.recording.recorder import Recorder
from async_rl.telemetry import WORKER_METRICS
from async_rl.transport.sending.sender import PushReport
from async_rl.types import EpisodeSpan, GroupTimes, Message, TakenGroup, Ticket, VersionRecord
from buffer.reference.memory_board import MemoryBoard
from buffer.reference.memory_buffer import MemoryBuffer
from learner.reporting.fleet_metrics import FleetMetrics
from learner.reporting.run_recorder import RunRecorder
from learner.versions.publish import CompletedPush
from rollout_workers.episodes.worker_records import WorkerRecords
from tests.support.groups import group

AHEAD_S = 3600.0
"""The worker's clock is an hour ahead of the learner's."""


def records_of_a_worker() -> WorkerRecord:
    """A dropped group and a swap, as a worker posts them with its next heartbeat."""
    records, now = WorkerRecords("w", keeps_dropped=True), time.time() + AHEAD_S
    spans = (EpisodeSpan("inference", 0, 0.25, 1.5, 3, 4),)
    rolled = replace(group("t000000007", (3, 4)), times=GroupTimes(reserved_at=now - 2.0, seconds=2.0, spans=spans))
    records.dropped(Ticket(id=rolled.id, task_index=5, version=3, attempt=2), "no_signal", rolled)
    records.swapped(4, 0.25)
    record = records.take()
    assert record is not None
    return record.model_copy(update={"swaps": (record.swaps[0].model_copy(update={"at": now - 0.25}),)})


async def test_times_of_a_worker_are_put_on_the_learners_clock(tmp_path: Path) -> None:
    board = MemoryBoard(MemoryBuffer())
    with Recorder(tmp_path, "learner", events_bytes=10**6, rollouts_bytes=10**6) as kept:
        record = RunRecorder(kept, board)
        version = VersionRecord(version=4, timeline="t", step=4, digest="")
        report = PushReport(staged=("w",), dropped={"x": "gone"}, how={"w": "gloo"}, num_bytes=9, seconds=0.1)
        record.pushed(CompletedPush(record=version, report=report, waited_s=0.5, at=time.time()))
        fleet = FleetMetrics(board, on_report=record.reported)
        async with asyncio.TaskGroup() as tasks:
            services = [tasks.create_task(fleet.run()), tasks.create_task(record.run())]
            await asyncio.sleep(0)
            now = time.time()
            for tokens in (10, 30):
                counters = {"tokens": tokens, "engine/running": 2.0, "inflight": 1}
                await board.post(WORKER_METRICS, {"worker": "w", "counters": counters, "time": time.time() + AHEAD_S})
                for _ in range(10):  # turns of the loop until the service has read it
                    await asyncio.sleep(0)
            await post(board, RECORDS, records_of_a_worker())
            for _ in range(10):
                await asyncio.sleep(0)
            for service in services:
                service.cancel()
    recording = Recording(tmp_path)
    assert [(event.fields["name"], event.fields["what"]) for event in recording.events(kinds=("process",))] == [("w", "joined")]
    [clock] = recording.events(kinds=("clock",))
    assert clock.fields == {"worker": "w", "offset_s": pytest.approx(-AHEAD_S, abs=1.0)}
    [row] = recording.rollouts(RolloutFilter(fate="no_signal", max_reward=1.5)).rows
    assert (row.id, row.sampled, row.group.attempt, row.group.step) == ("t000000007/0", 2, 2, None)
    found = recording.group("t000000007")
    assert found is not None
    assert found.facts.reserved_at == pytest.approx(now - 2.0, abs=1.0)
    [rolled_out, inference] = recording.life(found).spans
    assert (rolled_out.what, rolled_out.stop - rolled_out.start) == ("rolled out", pytest.approx(2.0))
    assert (inference.start - rolled_out.start, inference.newest_version) == (pytest.approx(0.25), 4)
    [swap] = recording.events(kinds=("swap",))
    assert (swap.fields["how"], swap.seconds) == ("push", 0.25)
    assert swap.at == pytest.approx(now, abs=1.5)
    assert [event.fields["dropped"] for event in recording.events(kinds=("push",))] == [{"x": "gone"}]
    assert [event.fields["how"] for event in recording.events(kinds=("push",))] == [{"w": "gloo"}]
    assert [event.fields["tokens"] for event in recording.events(kinds=("engine",))] == [0.0], "one a second"


async def test_a_block_begins_before_it_is_reported(tmp_path: Path) -> None:
    report = WorkerBlocked(worker="w", environment="e", place="e.py:3", seconds=5.0, at=1000.0, is_replaced=False)
    with Recorder(tmp_path, "learner", events_bytes=10**6, rollouts_bytes=10**6) as kept:
        RunRecorder(kept, MemoryBoard(MemoryBuffer())).blocked(report)
    [event] = Recording(tmp_path).events(kinds=("blocked",))
    assert (event.at, event.seconds) == (995.0, 5.0)


async def test_stale_groups_have_heads_and_those_that_were_not_seen_are_counted(tmp_path: Path) -> None:
    seen, unseen = "t000000001", "t000000002"

    @asynccontextmanager
    async def events() -> AsyncIterator[AsyncIterator[tuple[str, str]]]:
        async def dropped() -> AsyncIterator[tuple[str, str]]:
            for ticket in (seen, unseen):
                yield "dropped:stale", ticket

        yield dropped()

    with Recorder(tmp_path, "learner", events_bytes=10**6, rollouts_bytes=10**6) as kept:
        record = RunRecorder(kept, MemoryBoard(MemoryBuffer()))
        times = GroupTimes(reserved_at=time.time() - 2.0, seconds=1.5, spans=())
        stale = TakenGroup(
            group=replace(group(seen, (3, 4)), times=times), version_at_commit=5, version_at_take=9, task_index=4, attempt=2
        )
        record.went_stale(stale)
        record.went_stale(stale)  # the learner waits, and asks again before they are dropped
        await record.run_drops(events())
    recording = Recording(tmp_path)
    page = recording.rollouts(RolloutFilter(fate="stale"))
    assert [(row.id, row.reward, row.sampled, row.group.attempt) for row in page.rows] == [
        (f"{seen}/0", 1.0, 2, 2),
        (f"{seen}/1", 2.0, 2, 2),
    ]
    assert page.let_go.lost == {"unsent": 1}
    found = recording.group(seen)
    assert found is not None
    assert [span.what for span in recording.life(found).spans] == ["rolled out"]
    assert [event.fields for event in recording.events(kinds=("drop",))] == [
        {"group": ticket, "reason": "stale"} for ticket in (seen, unseen)
    ]


def test_values_of_user_code_that_cannot_be_recorded_are_counted() -> None:
    records, ticket = WorkerRecords("w", keeps_dropped=True), Ticket(id="t000000007", task_index=5, version=3, attempt=1)
    rolled = group(ticket.id, (3, 4))
    odd: Any = Message(role="assistant", content=cast("Any", None))
    for conversation in ((odd,), [{"role": "user", "content": "Hi."}], None):
        [first, *others] = rolled.rollouts
        said = replace(first, conversation=cast("Any", conversation))
        records.dropped(ticket, "quarantined", replace(rolled, rollouts=(said, *others)))
    record = records.take()
    assert record is not None
    assert (record.unsent, record.dropped) == (3, ())
