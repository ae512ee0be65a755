"""Tells the recording (async_rl/recording/) what the learner does and hears: steps, groups, pushes, checkpoints, workers."""

from __future__ import annotations

import base64
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import replace

import structlog

from async_rl.board.evaluations import EvaluationDone
from async_rl.board.inbox import Inbox
from async_rl.board.worker_reports import RECORDS, DroppedGroup, WorkerBlocked, WorkerNote, WorkerRecord
from async_rl.payloads.codec import BadPayload, decode
from async_rl.protocols import Board
from async_rl.recording.clocks import WorkerClocks
from async_rl.recording.ledger import fates_event
from async_rl.recording.recorded import GroupFacts, head_of
from async_rl.recording.recorder import Recorder
from async_rl.replay_protocol import BufferStats
from async_rl.types import RolloutGroup, TakenGroup
from learner.checkpoints.schedule import SavedCheckpoint
from learner.loop import FinishedStep
from learner.progress import Progress
from learner.reporting.fleet_metrics import FORGET_S, WorkerReport
from learner.versions.publish import CompletedPush

IDS_REMEMBERED = 100_000
"""Groups that are recorded once, however often they train."""
STALE_REMEMBERED = 1000
LANES = 64
"""With more workers than this, each worker's load is recorded less often, so that as many events come from a large fleet."""
PUSHES_REMEMBERED = 16

log = structlog.get_logger("learner")


class RunRecorder:
    def __init__(self, recorder: Recorder, board: Board) -> None:
        self._recorder, self._board = recorder, board
        self._clocks = WorkerClocks()
        self._recorded: dict[str, None] = {}
        """Ids of recorded groups, oldest first."""
        self._stale: dict[str, None] = {}
        """Ids of recorded stale groups that the buffer has not said to have dropped yet."""
        self._loads: dict[str, tuple[float, float]] = {}
        """Worker -> when its load was last recorded, and its counter of tokens then."""
        self._heard: dict[str, float] = {}
        """Worker -> when it last reported, by time.monotonic()."""
        self._pushed: deque[tuple[int, frozenset[str]]] = deque(maxlen=PUSHES_REMEMBERED)
        """Versions of the last pushes, and who staged them."""

    @property
    def is_on(self) -> bool:
        return self._recorder.is_on

    @property
    def metrics(self) -> Mapping[str, float]:
        lost = self._recorder.spans_dropped
        return {
            "recording/dropped": float(self._recorder.dropped),
            **({} if lost is None else {"recording/spans_dropped": float(lost)}),
        }

    # -- what the learner does --------------------------------------------------------------------------------------
    def started(self, progress: Progress) -> None:
        self._recorder.event("start", step=progress.step, version=progress.version, timeline=progress.timeline)

    def stepped(self, finished: FinishedStep, stats: BufferStats) -> None:
        """Record a step, the groups that it trained for the first time, and where all tickets are."""
        ended, batch, progress = time.time(), finished.step_batch, finished.progress
        began, ids = ended - finished.step_s, [taken.group.id for taken in batch.groups]
        self._recorder.event(
            "take",
            at=batch.taken_at - batch.take_s,
            seconds=batch.take_s,
            step=batch.step,
            version=progress.version,
            groups=ids,
        )
        self._recorder.event(
            "step",
            at=began,
            seconds=finished.step_s,
            step=batch.step,
            version=progress.version,
            groups=ids,
            skipped=finished.result.skipped,
            wait_s=round(finished.idle_s, 6),
            idle={cause: round(share, 4) for cause, share in finished.idle.items()},
        )
        self.counted(stats, batch.step)
        self._note_silent()
        for taken, advantages in zip(batch.groups, batch.packed.advantages, strict=True):
            if self._is_new(taken.group.id):
                facts = self._facts(taken, batch.step, batch.taken_at, began, ended)
                self._recorder.group(replace(facts, advantages=advantages), taken.group, taken.payload)

    def _note_silent(self) -> None:
        """Record workers that have stopped reporting; they may have ended, on a machine that nothing else tells of."""
        now = time.monotonic()
        for worker in [worker for worker, heard in self._heard.items() if now - heard > FORGET_S]:
            del self._heard[worker]
            self._recorder.event("process", name=worker, what="silent", detail=f"no report for {FORGET_S:g} s")

    def counted(self, stats: BufferStats, step: int) -> None:
        """Record where all tickets are."""
        self._recorder.add(fates_event(stats, at=time.time(), step=step))

    def saved(self, checkpoint: SavedCheckpoint) -> None:
        self._recorder.event(
            "checkpoint",
            seconds=checkpoint.seconds,
            step=checkpoint.step,
            bytes=checkpoint.bytes,
            stall_s=round(checkpoint.stall_s, 6),
        )

    def pushed(self, push: CompletedPush) -> None:
        report, record = push.report, push.record
        self._pushed.append((record.version, frozenset(report.staged)))
        self._recorder.event(
            "push",
            seconds=report.seconds,
            version=record.version,
            step=record.step,
            bytes=report.num_bytes,
            wait_s=round(push.waited_s, 6),
            staged=list(report.staged),
            dropped=dict(report.dropped),
            how=dict(report.how),
        )

    # -- what it hears ----------------------------------------------------------------------------------------------
    def evaluated(self, done: EvaluationDone) -> None:
        self._recorder.event("evaluation", step=done.record.step, version=done.record.version, metrics=done.metrics)

    def failed(self, note: WorkerNote) -> None:
        self._recorder.event("failure", **note.model_dump())

    def blocked(self, report: WorkerBlocked) -> None:
        fields = {"worker": report.worker, "environment": report.environment, "place": report.place}
        began = self._clocks.offset(report.worker) + report.at - report.seconds  # it is reported while it blocks
        self._recorder.event("blocked", at=began, seconds=report.seconds, **fields)

    def reported(self, report: WorkerReport) -> None:
        """Record a worker's load, and compare its clock."""
        worker, counters = report.worker, report.counters
        if worker not in self._heard:
            self._recorder.event("process", name=worker, what="joined", detail="")
        self._heard[worker] = time.monotonic()
        now, tokens = time.time(), counters.get("tokens", 0.0)
        sent_at = report.sent_at
        if sent_at is not None and self._clocks.heard(worker, sent_at=sent_at, received_at=now, boot=report.boot):
            self._recorder.event("clock", worker=worker, offset_s=round(self._clocks.offset(worker), 4))
        last, tokens_before = self._loads.get(worker, (0.0, tokens))
        if now - last < 0.9 * max(1.0, report.num_workers / LANES):
            return
        self._loads[worker] = now, tokens
        blocks = counters.get("kv_blocks", 0.0)
        self._recorder.event(
            "engine",
            at=last if last else now,
            seconds=now - last if last else 0.0,
            worker=worker,
            inflight=counters.get("inflight", 0.0),
            running=counters.get("engine/running", 0.0),
            waiting=counters.get("engine/waiting", 0.0),
            tokens=max(0.0, tokens - tokens_before),  # a worker that began anew counts from 0
            kv_used=round(counters.get("kv_blocks_used", 0.0) / blocks, 4) if blocks else 0.0,
        )

    async def run(self) -> None:
        """consumes: records of workers (board.read)    produces: events, heads of dropped groups    unblocked by: any worker"""
        inbox = await Inbox.open(self._board, RECORDS, WorkerRecord)
        while True:
            for record in await inbox.read():
                self._add(record)

    async def run_drops(self, events: AbstractAsyncContextManager[AsyncIterator[tuple[str, str]]]) -> None:
        """consumes: the buffer's events    produces: an event for each drop and quarantine    unblocked by: any ticket"""
        async with events as incoming:
            async for what, ticket in incoming:
                reason = what.removeprefix("dropped:")
                if reason != what or what == "quarantined":
                    self._recorder.event("drop", group=ticket, reason=reason)
                if reason == "stale" and ticket not in self._stale:
                    self._recorder.note_unsent(1)
                self._stale.pop(ticket, None)

    def went_stale(self, stale: TakenGroup) -> None:
        """Record the head of a group that the buffer is about to drop."""
        group = stale.group
        if group.id in self._stale:
            return
        self._stale[group.id] = None
        if len(self._stale) > STALE_REMEMBERED:
            del self._stale[next(iter(self._stale))]
        head, counts = head_of(group)
        reserved_at, ready_at = self._rolled_out(group)
        facts = GroupFacts(
            fate="stale",
            task_index=stale.task_index,
            attempt=stale.attempt,
            version_at_commit=stale.version_at_commit,
            reserved_at=reserved_at,
            ready_at=ready_at,
            is_head=True,
            counts=counts,
        )
        self._recorder.group(facts, head)

    def _add(self, record: WorkerRecord) -> None:
        offset = self._clocks.offset(record.worker)
        for swap in record.swaps:
            was_pushed = any(version == swap.version and record.worker in staged for version, staged in self._pushed)
            how = "push" if was_pushed else "catch_up"
            self._recorder.event(
                "swap", at=swap.at + offset, seconds=swap.seconds, worker=record.worker, version=swap.version, how=how
            )
        for dropped in record.dropped:
            self._add_dropped(record.worker, dropped)
        self._recorder.note_unsent(record.unsent)

    def _add_dropped(self, worker: str, dropped: DroppedGroup) -> None:
        try:
            group = decode(base64.b64decode(dropped.payload))
        except (BadPayload, ValueError) as error:
            log.warning("a dropped group cannot be recorded", worker=worker, reason=str(error))
            return
        reserved_at, ready_at = self._rolled_out(group)
        facts = GroupFacts(
            fate=dropped.fate,
            task_index=dropped.task_index,
            attempt=dropped.attempt,
            reserved_at=reserved_at,
            ready_at=ready_at,
            is_head=True,
            counts=dropped.counts,
        )
        self._recorder.group(facts, group)

    def _facts(self, taken: TakenGroup, step: int, taken_at: float, began: float, ended: float) -> GroupFacts:
        reserved_at, ready_at = self._rolled_out(taken.group)
        return GroupFacts(
            fate="trained",
            task_index=taken.task_index,
            attempt=taken.attempt,
            step=step,
            version_at_take=taken.version_at_take,
            version_at_commit=taken.version_at_commit,
            reserved_at=reserved_at,
            ready_at=min(ready_at, taken_at),
            taken_at=taken_at,
            trained_from=began,
            trained_at=ended,
        )

    def _rolled_out(self, group: RolloutGroup) -> tuple[float, float]:
        """Return when a group's ticket was reserved and its last episode scored, on the learner's clock; 0: not measured."""
        if (times := group.times) is None:
            return 0.0, 0.0
        reserved_at = times.reserved_at + self._clocks.offset(group.worker)
        return reserved_at, reserved_at + times.seconds

    def _is_new(self, group: str) -> bool:
        if group in self._recorded:
            return False
        self._recorded[group] = None
        if len(self._recorded) > IDS_REMEMBERED:
            del self._recorded[next(iter(self._recorded))]
        return True
