"""Receive one version of a running run: join its fleet as a worker, take the weights, leave. Training is not delayed."""

from __future__ import annotations

import asyncio
import socket
import uuid
from collections.abc import Mapping

from torch import Tensor
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from async_rl.board.inbox import Inbox, post
from async_rl.board.machines import MACHINES, own_machine
from async_rl.config import Config
from async_rl.errors import ServiceStopped
from async_rl.models.shape import ModelShape
from async_rl.protocols import Board
from async_rl.supervision import run_with
from async_rl.transport.messages import TO_WORKERS, TO_WORKERS_MESSAGES
from async_rl.transport.wire.gpus import gpu_name
from async_rl.types import VersionRecord
from rollout_workers.inference.rollout_engine import RolloutEngine
from rollout_workers.weight_receiver import weight_receiver


async def take_version(
    board: Board,
    store: Store,
    engine: RolloutEngine,
    shape: ModelShape,
    config: Config,
    *,
    at_step: int,
) -> VersionRecord:
    """Receive the first version of at least `at_step` optimizer steps; the engine keeps it."""
    name = f"{socket.gethostname()}-evaluator-{uuid.uuid4().hex[:6]}"
    await post(board, MACHINES, own_machine(name, gpu_name(engine.device)))
    receiver = weight_receiver(config, board, store, engine, shape, name=name, is_evaluator=True)
    taken: asyncio.Future[VersionRecord] = asyncio.get_running_loop().create_future()

    async def swap(version: int, tensors: Mapping[str, Tensor]) -> None:
        if version < engine.version:
            raise ServiceStopped(f"version {version} is live, but {engine.version} was evaluated before: the run has gone back")
        record = next((record for record in await board.versions() if record.version == version), None)
        if record is None:
            raise ServiceStopped(f"the board does not know version {version}, although it is live")
        if record.step >= at_step and not taken.done():  # not the one that was evaluated: the next has not been pushed yet
            await engine.swap(version, tensors)
            taken.set_result(record)

    return await run_with(lambda: taken, weights=lambda: receiver.run(swap), engine=engine.watch)


async def until_due(board: Board, last: VersionRecord | None, every: int) -> int:
    """Wait until the next version to evaluate is about to be pushed; return how many steps it must have."""
    inbox = await Inbox.open(board, TO_WORKERS, TO_WORKERS_MESSAGES)
    while True:
        live = await board.live_version()
        due = next_due(live, last, every)
        if live is not None and live.step >= due - 1:
            return due
        await inbox.read()  # versions that go live are announced there


def next_due(live: VersionRecord | None, last: VersionRecord | None, every: int) -> int:
    """Pure: the step to evaluate after `last`. An evaluator that starts late begins with the next multiple; after a resume
    it follows the learner back.
    """
    if live is None:
        return 0
    if last is None:
        return -(-live.step // every) * every
    reached = last.step if live.timeline == last.timeline else live.step
    return (reached // every + 1) * every
