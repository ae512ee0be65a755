"""A learner reduced to its end of the wire, as a process that pushes small versions for as long as it lives.

usage: python wire_stream.py URL RUN
"""

from __future__ import annotations

import asyncio
import os
import sys
from itertools import count

import torch

from async_rl.config import WireConfig
from tests.support.wire_board import board_of
from tests.support.wire_weights import sending, weights

WIRE = WireConfig(operation_timeout_s=60.0, bucket_mb=0.25, shared_memory=False)
ROWS = 4
PAUSE_S = 0.05
OTHER_FILES = 100
"""Are open beside what the wire needs, as in a learner with a model."""


async def main(url: str, run: str) -> None:
    tensors = weights(0, rows=ROWS)
    for _ in range(OTHER_FILES):
        os.open(os.devnull, os.O_RDONLY)
    async with board_of(url, run) as board, sending(board, WIRE, tensors) as sender:
        for version in count(1):
            await sender.wait_for_members_behind(version)
            await sender.push(version, tensors)
            await sender.flip(version)
            sender.records.pop(version - 1, None)  # its memory is used again
            await asyncio.sleep(PAUSE_S)


if __name__ == "__main__":
    torch.set_num_threads(1)
    asyncio.run(main(*sys.argv[1:]))
