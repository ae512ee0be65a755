"""The learner's composition root, for one rank: config -> objects -> loop."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import uuid
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import structlog

from async_rl.board import shared_config
from async_rl.board.fleet_requests import LEARNER, drain_on_request
from async_rl.board.inbox import post
from async_rl.board.machines import MACHINES, own_machine
from async_rl.checkpoints.trained_steps import first_timeline, read_trained
from async_rl.config import HEARTBEAT_S, Config
from async_rl.config.exposure import is_loopback
from async_rl.config.loading import load_named
from async_rl.durable.best_effort import BestEffortRows
from async_rl.durable.failpoints import arm_from
from async_rl.durable.private_files import keep_files_private
from async_rl.errors import boundary
from async_rl.launch.own_address import interface_of, own_address
from async_rl.launch.package_guard import guard
from async_rl.models.from_config import model_shape
from async_rl.models.shape import ModelShape
from async_rl.protocols import Board, GroupStores
from async_rl.recording.recorder import Recorder
from async_rl.recording.spans.export import SpanExport
from async_rl.recording.spans.making import SpanMaker
from async_rl.recording.spans.sender import SpanSender
from async_rl.replay_protocol import ReplayBuffer
from async_rl.supervision import (
    PREDECESSOR,
    die_with_parent,
    drain_on_signals,
    ends_after,
    keep_pauses_short,
    run_with,
    signs_of_life,
    stall_watchdog,
    work_limit,
)
from async_rl.supervision.liveness.leaving import leave_at_once
from async_rl.supervision.processes.descriptors import enough_descriptors
from async_rl.telemetry import configure_logs, open_sinks, read_last_row
from async_rl.tokenization.tokenizers import open_tokenizer
from async_rl.transport.sending.sender import WeightSender
from async_rl.transport.wire.gpus import gpu_name
from async_rl.types import Recovery
from buffer import open_archive, open_board, open_buffer, open_group_stores
from buffer.archive.service import archive_spent, drain_spent
from buffer.redis_buffer import RedisBuffer
from learner.batches.batch import pack_batch
from learner.checkpoints.fences import Fences
from learner.guard.actions import TrainingGuard
from learner.loop import FinishedStep, Loop
from learner.objective import Objective, load_objective
from learner.pace.pacer import Pacer
from learner.packing.cost import cost_of
from learner.prefetch import Prefetcher
from learner.priorities import load_priority, weigh_groups
from learner.progress import Progress
from learner.ranks.model_set import check_model_set
from learner.ranks.place import RankPlace, place_from
from learner.ranks.rank_group import follow
from learner.ranks.rank_group_thread import RankGroupThread
from learner.ranks.rendezvous import open_rendezvous
from learner.reporting.evaluations import Evaluations
from learner.reporting.fleet_metrics import FleetMetrics
from learner.reporting.journal import Journal
from learner.reporting.memory import memory_metrics
from learner.reporting.report import Reporter, token_metrics
from learner.reporting.run_recorder import RunRecorder
from learner.reporting.worker_reports import WorkerReports
from learner.versions.publish import Publisher
from learner.versions.push_policy import PushPolicy
from learner.versions.requests import WeightRequests

ARCHIVE_DRAIN_S = 30.0
"""Time for archiving spent groups at the end; the rest stays in the buffer until the run is resumed."""

log = structlog.get_logger("learner")  # __name__ is __main__, which would count as a library


def main() -> None:
    with leave_at_once(), boundary("async-rl learner"), signs_of_life(os.environ), enough_descriptors():
        guard()
        keep_files_private()
        config = load_named(sys.argv[1:])
        configure_logs("learner", run_folder=config.run_folder)
        arm_from(os.environ)
        place = place_from(os.environ)
        if place.world_size > 1 and place.file is None and (interface := interface_of(own_address(config))) is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)  # gloo would listen where the host's own name leads
        if place.is_under_torchrun:  # an orphaned rank 0 would keep the lease from its successor
            die_with_parent()
        objective = load_objective(config.learner.objective)
        # Before the lease is acquired: importing a Hugging Face tokenizer may take longer than a lease lasts.
        shape = model_shape(config.model, open_tokenizer(config.tokenizer).vocab_size)
        check_model_set(config, objective, shape)
        with work_limit(config.supervision.work_limit_s), open_group_stores(config) as stores:
            if place.rank == 0:
                asyncio.run(lead(config, objective, shape, place, stores))
            else:
                follow(config, objective, shape, stores, open_rendezvous(place, stores, life=None))


async def lead(config: Config, objective: Objective, shape: ModelShape, place: RankPlace, stores: GroupStores) -> None:
    with stall_watchdog(on_beat=ends_after(config.supervision.silence_s)):
        async with open_buffer(config) as buffer, open_board(config) as board:
            stop = drain_on_signals()  # before this line a signal ends the process at once: there is nothing to drain
            await board.agree("learner", config.fleet_facts)
            fences, (owner, succeeds) = Fences(config.run_folder), owners(place, os.environ)
            fence = await buffer.acquire(owner, config.limits, after=fences.highest(), succeeds=succeeds)
            fences.claim(fence, owner)
            await shared_config.share(board, config, fence=fence)
            run = LearnerRun(
                config=config,
                objective=objective,
                shape=shape,
                buffer=buffer,
                board=board,
                owner=owner,
                fence=fence,
                stop=stop,
            )
            await run_with(
                lambda: learn(run, place, stores),
                hold=lambda: hold(buffer, fence),
                requests=lambda: drain_on_request(board, LEARNER, stop),
            )
            await buffer.resign(fence)


def owners(place: RankPlace, environ: Mapping[str, str]) -> tuple[str, str]:
    """The names by which this learner and the one that it replaces ("": none) hold the run: host and supervised process."""
    host, pid = socket.gethostname(), os.getpid() if place.file is None else os.getppid()  # the parent of ranks is supervised
    before = environ.get(PREDECESSOR)
    return f"{host}:{pid}", f"{host}:{before}" if before is not None else ""


async def hold(buffer: ReplayBuffer, fence: int) -> None:
    """Service: renew the learner's lease. Raises FenceLost, which ends the learner, when another learner has the run."""
    while True:
        await asyncio.sleep(HEARTBEAT_S)
        await buffer.hold(fence)


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerRun:
    """What rank 0 works with from its lease on."""

    config: Config
    objective: Objective
    shape: ModelShape
    buffer: RedisBuffer
    board: Board
    owner: str
    """The name by which it holds the run."""
    fence: int
    stop: asyncio.Event
    """Set by a signal: end after the current step."""


async def learn(run: LearnerRun, place: RankPlace, stores: GroupStores) -> None:
    """Open the parts of the learner, resume, and train until the last step or `stop`."""
    config, buffer, board, fence = run.config, run.buffer, run.board, run.fence
    buffer.vocab_size = run.shape.vocab_size
    priority = load_priority(config.replay.priority)
    describe_memory(config, run.shape.context_tokens)
    warn_of_loopback(config)
    async with AsyncExitStack() as parts:
        meet = partial(open_rendezvous, place, stores, life=fence)
        ranks = await parts.enter_async_context(
            RankGroupThread.open(config, run.objective, run.shape, stores, life=fence, meet=meet)
        )
        pacer = Pacer(config, buffer=buffer, fence=fence)
        await pacer.begin()
        progress, recovery = await resume(ranks, buffer, fence, config.run_folder, config.replay.max_uses)
        keep_pauses_short()
        await post(board, MACHINES, own_machine(run.owner, gpu_name(ranks.device)))
        rank_sender = await ranks.open_sender()
        sender = await parts.enter_async_context(WeightSender(board, config.wire, rank_sender, fence=fence))
        record = RunRecorder(parts.enter_context(open_recorder(config, progress)), board)
        record.started(progress)
        buffer.on_stale = record.went_stale if record.is_on else None
        policy = PushPolicy.of(config)
        publisher = Publisher(buffer=buffer, fence=fence, sender=sender, policy=policy, on_push=record.pushed)
        requests = WeightRequests(board, publisher, config.run_folder)
        await requests.resume()
        fleet = FleetMetrics(board, on_report=record.reported)
        reports = WorkerReports(board, on_note=record.failed, on_blocked=record.blocked)
        evaluations = Evaluations(board, config.evaluation, on_result=record.evaluated)
        training_guard = TrainingGuard(
            config.learner.guard, max_age=config.staleness.max_age, buffer=buffer, fence=fence, ranks=ranks
        )
        await training_guard.begin()
        reporter = parts.enter_context(open_reporter(config, publisher, progress))
        journal = parts.enter_context(
            Journal(config.run_folder, fence=fence, disk_wait_s=config.learner.disk_wait_s, meanwhile=ranks.idle)
        )
        archive = parts.enter_context(open_archive(config)) if config.retention.archive else None
        may_be_spent = asyncio.Event()  # wakes the archive: more groups may have been spent
        await journal.begin(progress, lost=recovery.lost)

        async def report(finished: FinishedStep) -> None:
            if config.replay.max_uses > 1 and config.staleness.selector == "prioritized":
                await buffer.prioritize(fence, weigh_groups(finished.step_batch, priority))
            may_be_spent.set()
            stats = await buffer.stats()
            step = finished.progress.step
            unreleased = step - publisher.released_step
            pace = await pacer.after(stats, step=step, unreleased_steps=unreleased, waits=prefetcher.waits)
            record.stepped(finished, stats)
            memory = memory_metrics(ranks.device)
            heard = {**fleet.row(), **training_guard.row(), **pace, **evaluations.row(), **record.metrics, **memory}
            reporter.write(finished, stats, heard)
            await training_guard.after(finished.result, waited=finished.idle["idle/no_groups"])

        prefetcher = open_prefetcher(run, ranks, fleet, reports)
        loop = Loop(
            buffer=buffer, fence=fence, ranks=ranks, prefetcher=prefetcher,
            publisher=publisher, config=config.learner, record=journal.add,
            record_rollback=journal.add_rollback, report=report, make_room=pacer.make_room, stop=run.stop,
            on_saved=record.saved,
        )  # fmt: skip

        async def train() -> None:
            last = await loop.run(progress)
            books = await buffer.stats()  # with the last checkpoint, which the row of the last step does not know
            record.counted(books, last.step)
            if last.step > progress.step:
                reporter.add(last.step, token_metrics(books))
            await evaluations.wait_for_last(progress.step, last.step, run.stop)  # workers still get weights meanwhile
            while row := evaluations.row():
                reporter.add(last.step, row)
            log.info(reporter.closing_sentence(last.step, config.learner.steps), folder=str(config.run_folder))

        await run_with(
            train,
            publisher=publisher.run,
            weight_requests=requests.run,
            fleet_metrics=fleet.run,
            worker_notes=reports.run_notes,
            blocked_workers=reports.run_blocked,
            evaluations=evaluations.run,
            **({"records": record.run, "drops": partial(record.run_drops, buffer.events())} if record.is_on else {}),
            **({"archive": partial(archive_spent, buffer, fence, archive, wake=may_be_spent)} if archive is not None else {}),
        )
        if archive is not None:
            await drain_spent(buffer, fence, archive, within_s=ARCHIVE_DRAIN_S)


def open_prefetcher(run: LearnerRun, ranks: RankGroupThread, fleet: FleetMetrics, reports: WorkerReports) -> Prefetcher:
    batch, layout = run.config.batch, run.config.learner.parallel
    pack = partial(
        pack_batch,
        objective=run.objective,
        capacity=batch.bin_tokens,
        longest=run.shape.context_tokens,
        too_long=batch.too_long,
        num_shards=ranks.num_shards,
        minibatches=batch.minibatches,
        multiple=layout.slot_multiple,
        bins_multiple=layout.bins_multiple,
        cost=cost_of(run.shape),
    )
    return Prefetcher(
        buffer=run.buffer, fence=run.fence, batch=batch, staleness=run.config.staleness, pack=pack,
        num_workers=lambda: fleet.num_workers, blocked_workers=lambda: reports.blocked,
    )  # fmt: skip


@contextmanager
def open_reporter(config: Config, publisher: Publisher, progress: Progress) -> Iterator[Reporter]:
    """Open metrics and samples; totals continue from the last row of a resumed run."""
    with (
        closing(open_sinks(config, resumed_after=progress.step)) as sink,
        closing(BestEffortRows(config.run_folder / "samples.jsonl", max_bytes=config.metrics.max_bytes)) as samples,
    ):
        last = read_last_row(config.run_folder / "metrics.jsonl")
        yield Reporter(sink=sink, samples=samples, publisher=publisher, before=last.values if last is not None else {})


def open_recorder(config: Config, progress: Progress) -> Recorder:
    """Open the recording of events and rollouts, within its size limits, and the export of their spans."""
    wanted, spans = config.recording, None
    if wanted.otlp_endpoint:
        began = first_timeline(config.run_folder)
        maker = SpanMaker(began if began else progress.timeline, share=wanted.otlp_share)
        spans = SpanExport(maker, SpanSender(wanted.otlp_endpoint, run=config.run.name, key="recording.otlp_endpoint"))
    return Recorder(
        config.run_folder,
        "learner",
        events_bytes=wanted.events_bytes,
        rollouts_bytes=wanted.rollouts_bytes,
        spans=spans,
    )


def describe_memory(config: Config, tokens_per_rollout: int) -> None:
    """Log at the start how much memory the buffer may need, and warn if Redis has less."""
    needed_mb, given_mb = config.buffer_mb(tokens_per_rollout), config.redis.max_memory_mb
    summary = f"the buffer holds at most {config.max_groups} groups, {needed_mb:.0f} MB if all have the maximum length"
    if config.redis.url or needed_mb <= given_mb:
        log.info(summary)
    else:
        log.warning(
            f"{summary}; redis.max_memory_mb is {given_mb}: when it is full, workers wait and checkpoints are written early, "
            "so raise it, or lower learner.checkpoint_every or retention.keep_steps"
        )


def warn_of_loopback(config: Config) -> None:
    """Warn if Redis is on another machine, and workers there would look for the weights on their own."""
    if is_loopback(config.wire.host) and not is_loopback(address := own_address(config)):
        log.warning(
            f"wire.host is {config.wire.host}: workers on other machines get no weights; if the network is private, set "
            f"wire.host: {address} and wire.insecure: true"
        )


async def resume(
    ranks: RankGroupThread, buffer: ReplayBuffer, fence: int, run_folder: Path, max_uses: int
) -> tuple[Progress, Recovery]:
    """Load the newest checkpoint and recover the buffer; issue a version for the loaded weights in a new timeline."""
    found = await ranks.load()
    step = found.step if found else 0
    # Groups trained before the checkpoint matter only if they may have been trained again after it.
    journal = await asyncio.to_thread(read_trained, run_folder, after=0 if max_uses > 1 else step)
    undone = journal.undone(step) if journal is not None else []
    recovery = await buffer.recover(fence, found.position if found else None, undone)
    version = await buffer.issue(fence, after=max(recovery.version, Journal.highest_version(run_folder)))
    progress = Progress(step=step, version=version, timeline=uuid.uuid4().hex[:8])
    if found or recovery.version >= 0:
        log.info(
            f"resumes from step {progress.step} as version {progress.version}",
            groups_returned=recovery.returned,
            groups_spent=recovery.spent,
        )
    if recovery.lost:
        log.warning(
            f"the checkpoint of a later step is damaged or gone: {recovery.lost} groups that it contained are lost "
            "from the weights, and their tasks are rolled out again"
        )
    return progress, recovery


if __name__ == "__main__":
    main()
