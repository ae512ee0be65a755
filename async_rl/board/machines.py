"""What a process of a run says of its machine, once, when it starts; `async-rl doctor` compares them."""

from __future__ import annotations

import socket
import time

from async_rl.board.inbox import BoardMessage
from async_rl.imports.software import nvidia_driver, software

MACHINES = "machines"
"""The board's topic."""


class MachineNote(BoardMessage):
    process: str
    """The id by which a worker is a member, or the name by which a learner holds the run."""
    host: str
    software: dict[str, str]
    """Versions by package."""
    gpu: str
    """Name of the GPU that it computes on; empty: none."""
    driver: str
    """Version of the NVIDIA driver; empty: none."""
    time: float
    """Its clock, in seconds since 1970; the position of the message has that of Redis."""


def own_machine(process: str, gpu: str = "") -> MachineNote:
    return MachineNote(
        process=process, host=socket.gethostname(), software=software(), gpu=gpu, driver=nvidia_driver(), time=time.time()
    )
