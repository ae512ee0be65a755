"""The rollout worker's composition root: config -> objects -> run."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import uuid
import zlib
from collections.abc import Mapping

import structlog
from torch import Tensor

from async_rl.config import HEARTBEAT_S, Config
from async_rl.config_files import load_named
from async_rl.errors import boundary
from async_rl.failpoints import arm_from
from async_rl.megatron.parallel import resolve_device
from async_rl.model_shape import model_shape
from async_rl.packages import guard
from async_rl.protocols import Board, Member
from async_rl.supervision import drain_on_signals, run_with
from async_rl.telemetry import WORKER_METRICS, configure_logs
from async_rl.tokenizers import open_tokenizer
from async_rl.transport.gpus import gpu_of
from async_rl.transport.receiver import WeightReceiver
from buffer import open_board, open_buffer
from rollout_workers.inference.engine import MegatronEngine
from rollout_workers.tasks import TaskMix
from rollout_workers.worker import Worker

log = structlog.get_logger("rollout_workers")  # __name__ is __main__, which would count as a library


def main() -> None:
    with boundary("async-rl worker"):
        guard()
        config = load_named(sys.argv[1:])
        configure_logs("worker")
        arm_from(os.environ)
        asyncio.run(work(config))


async def work(config: Config) -> None:
    tokenizer = open_tokenizer(config.tokenizer)
    shape = model_shape(config.model, tokenizer.vocab_size)
    tasks = TaskMix.from_config(config.environments, config.run.seed)
    device = resolve_device(config.device)
    name = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
    async with open_buffer(config) as buffer, open_board(config) as board:
        stop = drain_on_signals()  # until here there is nothing to drain: a signal ends the process at once
        await board.agree("worker", config.fleet_facts)
        buffer.vocab_size = shape.vocab_size
        engine = MegatronEngine(
            shape,
            tokenizer,
            config.worker,
            config.sampling.generation_args,
            device=device,
            seed=zlib.crc32(f"{config.run.seed}/{name}".encode()),
            layer_spec=config.model.layer_spec,
        )
        async with engine:
            worker = Worker(
                name=name,
                buffer=buffer,
                inference=engine,
                tasks=tasks,
                batch=config.batch,
                settings=config.worker,
                seed=config.run.seed,
            )
            member = Member(id=name, host=socket.gethostname(), version=-1, device=str(device), gpu=gpu_of(device))
            receiver = WeightReceiver(board, member, engine.specs, config.wire, lease_s=config.leases.member_s)

            async def swap(version: int, tensors: Mapping[str, Tensor]) -> None:
                await engine.swap(version, tensors)
                worker.weights_changed()

            log.info("waits for the learner's weights")
            await run_with(
                lambda: worker.run(stop),
                weights=lambda: receiver.run(swap),
                engine=engine.watch,
                metrics=lambda: post_metrics(board, worker),
            )


async def post_metrics(board: Board, worker: Worker) -> None:
    """Service: the worker's counters, every heartbeat, for whoever writes the run's metrics."""
    while True:
        await asyncio.sleep(HEARTBEAT_S)
        counters = {**worker.counters.snapshot(), "inflight": worker.groups_in_flight}
        await board.post(WORKER_METRICS, {"worker": worker.name, "counters": counters})


if __name__ == "__main__":
    main()
