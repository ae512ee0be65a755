"""The rollout worker's composition root: config -> objects -> run."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import sys
import time
import uuid
import zlib
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from functools import partial

import structlog
from torch import Tensor

from async_rl.board.fleet_requests import drain_on_request
from async_rl.board.inbox import post
from async_rl.board.machines import MACHINES, own_machine
from async_rl.board.worker_reports import NOTES, RECORDS
from async_rl.config import HEARTBEAT_S, Config
from async_rl.config.loading import load_named
from async_rl.durable.failpoints import arm_from
from async_rl.durable.private_files import keep_files_private
from async_rl.errors import boundary
from async_rl.launch.commands import HAS_JOINED
from async_rl.launch.package_guard import guard
from async_rl.megatron.parallel import resolve_device
from async_rl.models.from_config import model_shape
from async_rl.protocols import Board
from async_rl.recording.clocks import boot_id
from async_rl.supervision import drain_on_signals, keep_pauses_short, run_with, signs_of_life, work_limit
from async_rl.supervision.liveness.leaving import leave_at_once
from async_rl.supervision.processes.descriptors import enough_descriptors
from async_rl.telemetry import WORKER_METRICS, configure_logs
from async_rl.tokenization.tokenizers import open_tokenizer
from async_rl.transport.wire.gpus import gpu_name
from async_rl.transport.wire.rendezvous import WIRE_STORE
from buffer import open_buffer_and_board, open_group_stores
from rollout_workers.blocked_worker import BlockedWorker, BlockingEnvironments
from rollout_workers.episodes.task_mix import TaskMix
from rollout_workers.gateway import HttpGateway, open_gateway
from rollout_workers.inference.open_engine import open_engine
from rollout_workers.limits.concurrency import load_of
from rollout_workers.policies import open_policies
from rollout_workers.weight_receiver import weight_receiver
from rollout_workers.worker import Worker
from rollout_workers.worker_parts import WorkerParts

log = structlog.get_logger("rollout_workers")  # __name__ is __main__, which would count as a library


def main() -> None:
    with leave_at_once(), boundary("async-rl worker"), signs_of_life(os.environ), enough_descriptors():
        guard()
        keep_files_private()
        config = load_named(sys.argv[1:])
        configure_logs("worker", run_folder=config.run_folder)
        arm_from(os.environ)
        with work_limit(config.supervision.work_limit_s):
            asyncio.run(work(config))


async def work(config: Config) -> None:
    tokenizer = open_tokenizer(config.tokenizer)
    shape = model_shape(config.model, tokenizer.vocab_size)
    tasks = TaskMix.from_config(
        config.environments,
        config.run.seed,
        environments_from=config.environments_from,
        has_joined=HAS_JOINED in os.environ,
    )
    name = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
    seed = zlib.crc32(f"{config.run.seed}/{name}".encode())
    engine = open_engine(config, shape, tokenizer, seed=seed, inherited=os.environ)
    async with AsyncExitStack() as opened:
        enter = opened.enter_async_context
        buffer, board = await enter(open_buffer_and_board(config))
        stores = opened.enter_context(open_group_stores(config))
        stop = drain_on_signals()  # before this there is nothing to drain: a signal ends the process at once
        await board.agree("worker", config.fleet_facts)
        buffer.vocab_size = shape.vocab_size
        policies = await enter(open_policies(config.policies, device=resolve_device(config.device)))
        gateway = await enter(
            open_gateway(config.worker.gateway, context_tokens=shape.context_tokens, run_token=run_token(os.environ))
        )
        await enter(engine)
        parts = WorkerParts(
            name=name,
            buffer=buffer,
            inference=engine,
            tasks=tasks,
            batch=config.batch,
            settings=config.worker,
            seed=config.run.seed,
            gateway=gateway,
            policies=policies,
            load=lambda: load_of(engine.metrics),
            keeps_dropped=config.recording.wants_dropped,
        )
        worker = Worker(parts)
        receiver = weight_receiver(config, board, stores.open(WIRE_STORE), engine, shape, name=name)

        async def swap(version: int, tensors: Mapping[str, Tensor]) -> None:
            began = time.monotonic()
            await engine.swap(version, tensors)
            worker.weights_changed()
            worker.records.swapped(version, time.monotonic() - began)

        def counters() -> dict[str, float]:
            return {**worker.counters.snapshot(), "inflight": len(worker.tickets), **engine.metrics.snapshot()}

        gateway.worker_counters = counters
        await post(board, MACHINES, own_machine(name, gpu_name(engine.device)))
        connect, limit_s = partial(open_buffer_and_board, config), config.worker.stall_limit_s
        blocked = BlockedWorker(worker=name, tickets=lambda: worker.tickets, connect=connect, limit_s=limit_s, stop=stop)
        keep_pauses_short()
        log.info("waits for the learner's weights")
        with blocked.watched():
            await run_with(
                lambda: worker.run(stop),
                weights=lambda: receiver.run(swap),
                engine=engine.watch,
                metrics=lambda: post_metrics(board, name, worker, counters, gateway),
                blocking=BlockingEnvironments(board, worker.environment_limits).run,
                requests=lambda: drain_on_request(board, name, stop),
            )


def run_token(environment: Mapping[str, str]) -> str:
    """The token for what belongs to no episode, such as the gateway's metrics. A random one unless the environment sets it."""
    given = environment.get("ASYNC_RL_GATEWAY_TOKEN")
    return given if given else secrets.token_hex(16)


async def post_metrics(
    board: Board, name: str, worker: Worker, counters: Callable[[], Mapping[str, float]], gateway: HttpGateway
) -> None:
    """Service: post the process's counters, notes about failures, and what the learner records of it, every heartbeat."""
    while True:
        await asyncio.sleep(HEARTBEAT_S)
        message = {"worker": name, "counters": {**counters(), **gateway.counters.snapshot()}, **own_clock()}
        await board.post(WORKER_METRICS, message)
        if (record := worker.records.take()) is not None:
            await post(board, RECORDS, record)
        for note in worker.failures.take_notes():
            await post(board, NOTES, note)


def own_clock() -> dict[str, float | str]:
    """By which the learner's recording compares this process's clock with its own."""
    return {"time": time.time(), "boot": boot_id()}


if __name__ == "__main__":
    main()
