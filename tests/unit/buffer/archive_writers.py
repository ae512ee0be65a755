"""Writers of one archive that are killed one after the other, at random: FOLDER SEED LIVES.

Each continues behind what its predecessor had acknowledged; every other one lives long enough to acknowledge something.
Prints how many groups were acknowledged in total.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

from async_rl.types import SpentGroup
from buffer.archive.writing import ArchiveWriter


def group(number: int) -> SpentGroup:
    """Make a group that takes a while to write; its payload cannot be decoded."""
    return SpentGroup(id=f"g{number}", step=number, payload=bytes([number % 256]) * (number % 7 * 100_000))


def live(folder: Path, begin: int, acknowledged: int, draw: random.Random) -> NoReturn:
    writer = ArchiveWriter(folder, run="r", max_gb=10.0, segment_bytes=2_000_000)
    while True:
        count = draw.randint(1, 6)
        writer.append([group(number) for number in range(begin, begin + count)])
        begin += count
        os.write(acknowledged, begin.to_bytes(8, "little"))


def main(folder: Path, seed: int, lives: int) -> int:
    draw = random.Random(seed)
    begin = 0
    for life in range(lives):
        readable, writable = os.pipe()
        if not (child := os.fork()):
            live(folder, begin, writable, draw)
        os.close(writable)
        answers = os.read(readable, 8) if life % 2 else b""
        time.sleep(draw.uniform(0, 0.06))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        with os.fdopen(readable, "rb") as pipe:
            answers += pipe.read()
        begin = int.from_bytes(answers[-8:], "little") if answers else begin
    return begin


if __name__ == "__main__":
    print(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
