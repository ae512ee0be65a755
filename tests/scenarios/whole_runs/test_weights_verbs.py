"""`async-rl weights ...` on a run that trains: what is live, held fast, taken back, and let go again."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from async_rl.checkpoints.manifest import candidates, read_manifest
from async_rl.config import Config
from async_rl.errors import boundary
from async_rl.types import VersionRecord
from buffer import open_board
from buffer.__main__ import main
from tests.support.run_history import last_step, lives, surviving
from tests.support.run_processes import audit, pid_of, program, read_config, write_config
from tests.support.waiting import until


class Weights:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self, *words: object, code: int = 0) -> str:
        """Do in this process what `async-rl weights WORDS` does in one of its own; return what it prints."""
        printed = io.StringIO()
        with redirect_stdout(printed), redirect_stderr(printed), pytest.raises(SystemExit) as ended, boundary("weights"):
            raise SystemExit(main(["weights", *map(str, words), "@", str(self._path)]))
        assert (ended.value.code or 0) == code, printed.getvalue()
        return printed.getvalue()

    def status(self) -> dict[str, Any]:
        return json.loads(self("status", "--json"))


def versions(config: Config) -> dict[int, VersionRecord]:
    async def read() -> list[VersionRecord]:
        async with open_board(config) as board:
            return await board.versions()

    return {record.version: record for record in asyncio.run(read())}


def live(config: Config) -> VersionRecord:
    return max(versions(config).values(), key=lambda record: record.version)


def test_pinned_rolled_back_and_let_go(tmp_path: Path) -> None:
    path = write_config(
        tmp_path,
        "held",
        tasks={"pace_s": 0.5},  # few steps, which leaves cores to other tests
        learner={"steps": 100_000, "checkpoint_every": 2, "keep_checkpoints": 1_000},
        wire={"push_every_steps": 2},
        leases={"learner_s": 600, "member_s": 60},  # who stands still for a moment is asked and listed as well
    )
    config, weights = read_config(path), Weights(path)
    saves = config.run_folder / "checkpoints"
    with program(tmp_path, "run", "@", path) as run:
        until(
            lambda: candidates(saves) and live(config).step > read_manifest(candidates(saves)[-1]).step,
            "what is live is newer than a checkpoint",
            while_alive=run,
        )

        assert "stays live" in weights("pin")
        assert "the weights are pinned (by hand)" in weights("push", code=2)
        pinned = weights.status()["live"]
        most = pinned["step"] + config.limits.steps_between_pushes
        until(lambda: last_step(config) == most, "the learner trains on for as long as the age bound lets it", while_alive=run)
        run.until_says("the weights are pinned (by hand)")
        assert last_step(config) == most, "then it waits"
        assert weights.status()["live"] == pinned
        assert f"version {pinned['version']} is live" in weights("status")

        goal = read_manifest(candidates(saves)[-1])
        assert goal.step < pinned["step"]
        assert "no checkpoint holds version 999999; there are versions" in weights("rollback", 999_999, code=2)
        assert f"the weights of step {goal.step} go out" in weights("rollback", goal.extra["version"])
        until(lambda: live(config).step == goal.step, "it goes live", while_alive=run)
        served, original = live(config), versions(config)[int(str(goal.extra["version"]))]
        assert served.digest == original.digest, "bit for bit what was served then"
        assert served.version == pinned["version"] + config.limits.steps_between_pushes + 1
        until(lambda: last_step(config) > most, "it is sampled from, and that is trained on", while_alive=run)
        said = weights.status()
        assert said["learner"]["version"] > served.version
        assert said["learner"]["pinned"] == f"rolled back to step {goal.step}"
        until(
            lambda: [worker["behind"] for worker in weights.status()["workers"]] == [0], "the worker serves it", while_alive=run
        )

        os.kill(pid_of(config, "learner"), signal.SIGKILL)
        until(lambda: live(config).timeline != served.timeline, "the next learner serves something", while_alive=run)
        assert live(config).digest == original.digest, "a rollback outlives the learner"

        assert "go out after the step" in weights("pin", "off")
        until(lambda: live(config).step > goal.step, "newer versions go out again", while_alive=run)
        run.signal(signal.SIGTERM)
        assert run.exit_code() == 0, run.output
    assert "Traceback" not in run.output
    trained = surviving(lives(config))
    assert [step.number for step in trained] == list(range(1, len(trained) + 1)), "training was not touched"
    assert audit(path)["clean"]
    assert "no learner of run held answers" in weights("pin", code=2)
    assert "no learner answers" in weights("status")
