"""The tools with an embedded server: what a vacuum frees and leaves alone, and watching while it crashes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from async_rl.config import Config
from async_rl.config.loading import load
from buffer import open_buffer
from buffer.server.embedded.server import EmbeddedServer, is_asleep
from tests.support.groups import group
from tests.support.run_processes import finished_module
from tests.support.runs import started
from tests.support.waiting import PATIENCE_S

CONFIG = """
run: {{name: cli, folder: {folder}}}
model: {{size: {{hidden: 8, layers: 1, heads: 1}}}}
environments: [{{type: even_digits}}]
"""
NOBODY = 4194305
"""A process id that Linux does not assign."""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG.format(folder=tmp_path))
    return path


@pytest.fixture
def buffer(tmp_path: Path) -> Callable[..., str]:
    def run(*words: object) -> str:
        done = finished_module(tmp_path, "buffer", *words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def freed(buffer: Callable[..., str], config: Path, *words: str) -> dict[str, dict[str, Any]]:
    return {part["what"]: part for part in json.loads(buffer("vacuum", *words, "@", config, "--json"))["freed"]}


def test_a_vacuum_of_a_run_that_has_ended(config: Path, buffer: Callable[..., str]):
    """The server is started, cleaned, and stopped again."""
    assert asyncio.run(work_and_leave(load(["@", str(config)]))) == "quarantined"
    planned = freed(buffer, config, "--dry-run")
    assert planned["refused payloads"]["note"].endswith("of 1 payloads")
    assert planned["remembered endings"]["count"] == 2
    assert "freed" in buffer("vacuum", "@", config).splitlines()[0]
    done = freed(buffer, config, "--quarantine")
    assert done["refused payloads"]["bytes"] > 0
    assert done["remembered endings"]["count"] == 0, "the vacuum before has freed them"
    assert json.loads(buffer("quarantine", "ls", "@", config, "--json")) == {"quarantine": []}
    audit = json.loads(buffer("audit", "@", config, "--json"))
    assert (audit["clean"], audit["stats"]["ready"]) == (True, 1), "what is alive stays"
    assert is_asleep(load(["@", str(config)]))


async def work_and_leave(config: Config) -> str:
    async with EmbeddedServer(config), open_buffer(config) as run:
        await started(run)
        good, bad, lost = await run.reserve("w", version=0, count=3, wait_s=5)
        await run.commit("w", group(good))
        await run.abandon("w", lost.id, "abandoned")
        return await run.commit("w", group(bad, versions=(0, 7)))


def test_leftovers_of_a_living_server_go_and_files_in_use_stay(config: Path, buffer: Callable[..., str]):
    command = [sys.executable, "-P", "-m", "buffer", "serve", "@", config]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as serve, contextlib.ExitStack() as ending:
        ending.callback(serve.kill)
        assert serve.stdout is not None
        assert "redis serves" in serve.stdout.readline()
        folder = load(["@", str(config)]).redis_folder
        dead, alive = folder / f"temp-rewriteaof-bg-{NOBODY}.aof", folder / f"temp-rewriteaof-bg-{os.getpid()}.aof"
        dead.write_bytes(b"x" * 1000)
        alive.touch()
        done = freed(buffer, config)
        assert (done["leftover files"]["count"], done["leftover files"]["bytes"]) == (1, 1000)
        assert (dead.exists(), alive.exists()) == (False, True)
        assert "left" in done["append-only file"]["note"]
        serve.send_signal(signal.SIGTERM)
        assert serve.wait(PATIENCE_S) == 0


async def test_tail_goes_on_after_a_crash_of_the_server(config: Path):
    run_config = load(["@", str(config)])
    command = [sys.executable, "-P", "-m", "buffer", "tail", "@", str(config)]
    async with EmbeddedServer(run_config) as server, open_buffer(run_config) as run:
        await started(run, max_age=50)
        follower = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        try:
            assert follower.stdout is not None
            assert follower.stderr is not None
            assert b"Ctrl-C ends it" in await follower.stderr.readline()
            os.kill(server.pid, signal.SIGKILL)
            heard = asyncio.create_task(follower.stdout.readline())
            for ticket in await run.reserve("w", version=0, count=100, wait_s=20):
                await run.commit("w", group(ticket))  # the follower may need a moment to come back, so one after the other
                if (await asyncio.wait({heard}, timeout=1))[0]:
                    break
            assert b"stored" in await heard
        finally:
            follower.send_signal(signal.SIGINT)
        assert await follower.wait() == 0
