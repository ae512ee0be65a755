"""Makes an engine's end of the weight wire, for a worker or an evaluator."""

from __future__ import annotations

import socket

from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from async_rl.config import Config
from async_rl.megatron.parallel import resolve_device, resolve_dtype
from async_rl.megatron.parameters.full_parameters import specs
from async_rl.models.shape import ModelShape
from async_rl.protocols import Board, Member
from async_rl.transport.receiving.receiver import WeightReceiver
from async_rl.transport.wire.gpus import gpus_of
from rollout_workers.inference.rollout_engine import RolloutEngine, placement_of


def weight_receiver(
    config: Config,
    board: Board,
    store: Store,
    engine: RolloutEngine,
    shape: ModelShape,
    *,
    name: str,
    is_evaluator: bool = False,
) -> WeightReceiver:
    """`store`: rendezvous.WIRE_STORE. `name`: the member's id."""
    placement = placement_of(engine)
    member = Member(
        id=name,
        host=socket.gethostname(),
        version=-1,
        device=str(engine.device),
        gpus=gpus_of(placement.devices),
        is_evaluator=is_evaluator,
    )
    return WeightReceiver(
        board,
        store,
        member,
        specs(shape, resolve_dtype(resolve_device(config.device))),
        config.wire,
        lease_s=config.leases.member_s,
        snapshots=config.snapshot_folder,
        placement=placement,
    )
