"""A learner reduced to its end of the weight wire, as a process that pushes version after version without a pause.

usage: python wire_pusher.py URL RUN VERSIONS

Version v has the weights of seed v. The first half goes over gloo; a second learner sends the rest through shared memory.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

import torch

from async_rl.config import WireConfig
from tests.support.engine_stage import weights
from tests.support.wire_board import StageBoard, board_of
from tests.support.wire_weights import sending


async def main(url: str, run: str, versions: str) -> None:
    count = int(versions)
    async with board_of(url, run) as board:
        await push(board, range(count // 2), WireConfig(shared_memory=False, bucket_mb=0.01), fence=1)
        await push(board, range(count // 2, count), WireConfig(), fence=2)


async def push(board: StageBoard, versions: Sequence[int], wire: WireConfig, *, fence: int) -> None:
    async with sending(board, wire, weights(0), fence=fence) as sender:
        for version in versions:
            await sender.wait_for_members_behind(version)
            report = await sender.push(version, dict(weights(version)))
            assert report.staged == ("worker",), report
            await sender.flip(version)


if __name__ == "__main__":
    torch.set_num_threads(1)
    asyncio.run(main(*sys.argv[1:]))
