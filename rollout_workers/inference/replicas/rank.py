"""The process of one rank: `python -m rollout_workers.inference.replicas.rank SETUP LEADER FOLLOWER...`, started by a Replica.

LEADER and FOLLOWER are numbers of open sockets. The leader is the worker for rank 0, and rank 0 for the others; rank 0
has one follower for each other rank.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]

from async_rl.errors import ConfigError, boundary, find_async_rl_error
from async_rl.launch.package_guard import guard
from async_rl.megatron import parallel
from async_rl.protocols import GenerationArgs
from async_rl.supervision import run_with, signs_of_life, work_limit
from async_rl.telemetry import configure_logs
from async_rl.tokenization.tokenizers import open_tokenizer
from rollout_workers.inference.engine import MegatronEngine
from rollout_workers.inference.replicas.frames import Broken, EngineReady, SocketPipe, pack
from rollout_workers.inference.replicas.lockstep import LeadingCore, LockstepCore, follow
from rollout_workers.inference.replicas.server import EngineServer
from rollout_workers.inference.replicas.setup import RankSetup
from rollout_workers.inference.replicas.shared_weights import WeightReader


def main() -> None:
    with boundary("async-rl engine"), signs_of_life(os.environ), ExitStack() as opened:
        guard()
        setup = RankSetup.model_validate_json(sys.argv[1])
        opened.enter_context(work_limit(setup.work_limit_s))
        configure_logs("worker")
        # Megatron gathers logits with functions that torch has renamed.
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
        _meet(setup)
        reader = WeightReader(setup.torch_device)
        leader, *followers = (opened.enter_context(socket.socket(fileno=int(number))) for number in sys.argv[2:])
        if setup.rank > 0:
            orders = SocketPipe(leader)
            follow(_core(setup, orders), orders, reader)
        else:
            asyncio.run(lead(setup, leader, [SocketPipe(follower) for follower in followers], reader))


def _meet(setup: RankSetup) -> None:
    ranks = setup.worker.tensor
    meeting = parallel.Rendezvous(store=FileStore(str(setup.store), ranks), rank=setup.rank, world_size=ranks)
    parallel.initialize(device=setup.torch_device, tensor=ranks, expert=setup.worker.expert, rendezvous=meeting)


def _core(setup: RankSetup, orders: SocketPipe) -> LockstepCore:
    try:
        return LockstepCore(
            shape=setup.shape,
            tokenizer=open_tokenizer(setup.tokenizer),
            worker=setup.worker,
            device=setup.torch_device,
            dtype=setup.torch_dtype,
            seed=setup.seed,
            layer_spec=setup.layer_spec,
            num_parcels=setup.num_parcels,
        )
    except ConfigError:
        orders.receive()  # rank 0 fails alike; wait until it has reported to the worker
        raise


async def lead(setup: RankSetup, worker: socket.socket, followers: Sequence[SocketPipe], reader: WeightReader) -> None:
    """Rank 0: serve the worker until it closes its socket."""
    requests, writer = await asyncio.open_connection(sock=worker)
    engine = MegatronEngine(
        setup.shape,
        open_tokenizer(setup.tokenizer),
        setup.worker,
        GenerationArgs(),  # the worker has merged the run's defaults already
        device=setup.torch_device,
        seed=setup.seed,
        dtype=setup.torch_dtype,
        layer_spec=setup.layer_spec,
        core=partial(LeadingCore, followers, num_parcels=setup.num_parcels),
    )
    try:
        async with engine:
            server = EngineServer(engine, reader, writer)
            writer.write(pack(EngineReady(kernel=engine.kernel)))
            await run_with(lambda: server.serve(requests), engine=engine.watch, metrics=server.report)
    except Exception as error:
        cause = ours if (ours := find_async_rl_error(error)) is not None else error
        writer.write(pack(Broken(kind=type(cause).__name__, reason=str(cause))))
        await writer.drain()
        raise
    finally:
        writer.close()


if __name__ == "__main__":
    main()
