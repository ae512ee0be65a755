"""A worker of a real run that starts after the learner has died: it rolls out with the weights that were left as files."""

from __future__ import annotations

import asyncio
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from async_rl.config import Config
from buffer import open_buffer
from tests.support.run_processes import Program, program, read_config, write_config
from tests.support.waiting import until


@pytest.mark.slow
def test_a_worker_that_starts_without_a_learner_rolls_out(tmp_path: Path) -> None:
    path = write_config(tmp_path, "late", wire={"snapshots": "weights"})
    config = read_config(path)
    folder = config.snapshot_folder
    assert folder is not None
    with ExitStack() as started:

        def start(*arguments: object) -> Program:
            return started.enter_context(program(tmp_path, *arguments))

        server = start("buffer", "serve", "@", path)
        learner = start("learner", "@", path)
        until(lambda: list(folder.glob("version-*")), "a version is written down", while_alive=learner)
        learner.signal(signal.SIGKILL)
        learner.exit_code()

        worker = start("worker", "@", path)
        worker.until_says("serves version 0, from a snapshot")
        until(lambda: asyncio.run(num_ready(config)), "a group is ready", while_alive=worker)
        worker.signal(signal.SIGTERM)
        assert worker.exit_code() == 0, worker.output
        server.signal(signal.SIGTERM)
        assert server.exit_code() == 0, server.output


async def num_ready(config: Config) -> int:
    async with open_buffer(config) as buffer:
        return (await buffer.stats()).ready
