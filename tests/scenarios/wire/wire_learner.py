"""A learner reduced to its end of the wire, as a process that scenarios may kill: it makes one version live and stays.

usage: python wire_learner.py URL RUN SNAPSHOTS VERSION

SNAPSHOTS may be empty. What the version's weights are: `weights(seed=VERSION)`.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import torch

from async_rl.config import WireConfig
from tests.support.wire_board import board_of, go_live
from tests.support.wire_weights import sending, weights

WIRE = WireConfig(operation_timeout_s=4.0, rendezvous_timeout_s=4.0, bucket_mb=0.25, shared_memory=False)


async def main(url: str, run: str, snapshots: str, version: int) -> None:
    folder = Path(snapshots) if snapshots else None
    async with board_of(url, run) as board, sending(board, WIRE, weights(0), snapshots=folder) as sender:
        await sender.push(version, weights(seed=version))  # without workers
        await go_live(board, url, run, sender.records[version])
        await sender.flip(version)
        await asyncio.Future()


if __name__ == "__main__":
    torch.set_num_threads(1)
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])))
