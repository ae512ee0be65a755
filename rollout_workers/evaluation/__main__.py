"""The evaluator's composition root: `async-rl eval` runs one evaluation, `async-rl evaluator` one after another."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import socket
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import partial

import structlog
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from async_rl.board.evaluations import EVALUATIONS, EvaluationDone
from async_rl.board.fleet_requests import EVALUATOR, drain_on_request
from async_rl.board.inbox import post
from async_rl.config import Config
from async_rl.config.loading import load_named
from async_rl.durable.private_files import keep_files_private
from async_rl.errors import boundary
from async_rl.launch.commands import SCHEDULED
from async_rl.launch.package_guard import guard
from async_rl.megatron.parallel import resolve_device
from async_rl.protocols import Board, InferenceInterface
from async_rl.supervision import drain_on_signals, ends_after, run_with, signs_of_life, stall_watchdog, work_limit
from async_rl.supervision.liveness.leaving import leave_at_once
from async_rl.supervision.processes.descriptors import enough_descriptors
from async_rl.telemetry import configure_logs
from async_rl.transport.wire.rendezvous import WIRE_STORE
from async_rl.types import VersionRecord
from buffer import open_board, open_buffer_and_board, open_group_stores
from rollout_workers.blocked_worker import BlockedWorker
from rollout_workers.evaluation.evaluator import Evaluator, open_environments
from rollout_workers.evaluation.live import take_version, until_due
from rollout_workers.evaluation.models import empty_engine, open_model
from rollout_workers.evaluation.report import EvaluatedModel, EvaluationReport
from rollout_workers.evaluation.subject import (
    CheckpointSubject,
    HuggingFaceFolder,
    LiveRun,
    PolicySubject,
    Subject,
    find_subject,
)
from rollout_workers.gateway import open_gateway
from rollout_workers.graders import open_graders
from rollout_workers.policies import open_policies

log = structlog.get_logger("rollout_workers.evaluation")  # __name__ is __main__, which would count as a library


def main() -> None:
    """Arguments: what to evaluate, which may be empty, and those of the configuration."""
    word, *args = sys.argv[1:]
    with (
        leave_at_once(),
        boundary("async-rl evaluator" if word == SCHEDULED else "async-rl eval"),
        signs_of_life(os.environ),
        enough_descriptors(),
    ):
        guard()
        keep_files_private()
        config = load_named(args)
        configure_logs("evaluator", run_folder=config.run_folder)
        with work_limit(config.supervision.work_limit_s):
            if word == SCHEDULED:
                asyncio.run(evaluate_on_schedule(config))
            else:
                asyncio.run(evaluate_once(find_subject(word, config), config))


async def evaluate_once(subject: Subject, config: Config) -> None:
    if isinstance(subject, LiveRun):
        async with open_fleet(config) as (board, store), empty_engine(config, os.environ) as empty:
            log.info("waits for the learner's weights")
            evaluated = describe_version(config, await take_version(board, store, empty.engine, empty.shape, config, at_step=0))
            async with open_evaluator(empty.engine, config, empty.shape.context_tokens) as evaluator:
                results = await evaluator.evaluate()
    else:
        evaluated = describe_subject(subject)
        async with (
            open_model(subject, config, os.environ) as model,
            open_evaluator(model.inference, config, model.context_tokens) as evaluator,
        ):
            results = await evaluator.evaluate()
    report = EvaluationReport(evaluated=evaluated, settings=config.evaluation, results=results)
    print(f"{evaluated.title}\n\n{report.summary}")
    print(report.write(config.run_folder / "eval"))


async def evaluate_on_schedule(config: Config) -> None:
    """Evaluate the weights of every `evaluation.every` steps of a run until told to stop."""
    async with open_fleet(config) as (board, store), empty_engine(config, os.environ) as empty:
        stop = drain_on_signals()  # before this there is nothing to drain: a signal ends the process at once
        blocked = BlockedWorker(
            worker=f"{socket.gethostname()}-{os.getpid()} (evaluator)",
            tickets=tuple,
            connect=partial(open_buffer_and_board, config),
            limit_s=config.worker.stall_limit_s,
            stop=stop,
        )
        # The next evaluator would be blocked by the same task, so this ends as a crash.
        ends = ends_after(config.worker.stall_limit_s)
        async with open_evaluator(empty.engine, config, empty.shape.context_tokens) as evaluator:

            async def follow() -> None:
                """
                consumes: versions (take_version)          waits for:    a version with the steps that are due
                produces: reports, metrics (board.post)    unblocked by: the learner's push
                """
                last: VersionRecord | None = None
                while True:
                    due = await until_due(board, last, config.evaluation.every)
                    last = await take_version(board, store, empty.engine, empty.shape, config, at_step=due)
                    await evaluate_version(evaluator, board, config, last)

            with stall_watchdog(on_stall=blocked.tell, on_beat=ends):
                await run_with(
                    stop.wait,
                    schedule=follow,
                    engine=empty.engine.watch,
                    requests=lambda: drain_on_request(board, EVALUATOR, stop),
                )


async def evaluate_version(evaluator: Evaluator, board: Board, config: Config, live: VersionRecord) -> None:
    results = await evaluator.evaluate()
    report = EvaluationReport(evaluated=describe_version(config, live), settings=config.evaluation, results=results)
    log.info(f"evaluated step {live.step}", page=str(report.write(config.run_folder / "eval")), **report.metrics)
    await post(board, EVALUATIONS, EvaluationDone(record=live, metrics=report.metrics))


@asynccontextmanager
async def open_fleet(config: Config) -> AsyncGenerator[tuple[Board, Store]]:
    """Connect to the run whose weights are evaluated. Over the store the process groups of the weight wire form."""
    async with open_board(config) as board:
        with open_group_stores(config) as stores:
            yield board, stores.open(WIRE_STORE)


@asynccontextmanager
async def open_evaluator(inference: InferenceInterface, config: Config, context_tokens: int) -> AsyncGenerator[Evaluator]:
    gateway = config.worker.gateway.model_copy(update={"port": 0})  # a worker on this machine may use the configured port
    async with (
        open_graders(config.worker.grader_processes),
        open_policies(config.policies, device=resolve_device(config.device)) as policies,
        open_gateway(gateway, context_tokens=context_tokens, run_token=secrets.token_hex(16)) as opened,
        open_environments(config) as environments,
    ):
        yield Evaluator(environments, config, inference, gateway=opened, policies=policies)


def describe_version(config: Config, record: VersionRecord) -> EvaluatedModel:
    return EvaluatedModel(
        name=f"step-{record.step:08d}-version-{record.version}",
        title=f"Run {config.run.name} after step {record.step} (version {record.version})",
        step=record.step,
        version=record.version,
    )


def describe_subject(subject: CheckpointSubject | HuggingFaceFolder | PolicySubject) -> EvaluatedModel:
    if isinstance(subject, CheckpointSubject):
        step, version = subject.manifest.step, subject.manifest.extra.get("version")
        return EvaluatedModel(
            name=f"checkpoint-{subject.path.name}",
            title=f"Checkpoint {subject.path}",
            step=step,
            version=version if isinstance(version, int) else None,
        )
    what = subject.name if isinstance(subject, PolicySubject) else str(subject.path)
    stamp = f"{datetime.now(UTC):%Y%m%d-%H%M%S}"
    return EvaluatedModel(name=f"{re.sub(r'[^A-Za-z0-9.]+', '-', what).strip('-')}-{stamp}", title=what)


if __name__ == "__main__":
    main()
