"""The commands of the pages, typed as they stand: beside a run that has ended, and while one lives."""

from __future__ import annotations

import re
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from async_rl.cli.grammar import find_verb
from async_rl.cli.main import VERBS
from async_rl.config.loading import load
from tests.support.page_commands import Command, commands, pages
from tests.support.repository import ROOT
from tests.support.run_history import last_step
from tests.support.run_processes import TASKS, finished, program, stood_still
from tests.support.waiting import until

ENDED, LIVING = "NAME", "shapes"
"""Names of runs on the pages. Where a verb needs processes of the run, NAME is the living one."""
SERVERS = ("view", "env serve")
OF_A_LIVING_RUN = (
    "weights status",
    "weights pin",
    "env ls",
    "env attach",
    "env weight",
    "env detach",
    "ctl show",
    "ctl set",
)
RUN = {
    "run": {"name": LIVING},
    "model": {"size": {"hidden": 32, "layers": 1, "heads": 2}},
    "tokenizer": {"type": "characters", "alphabet": "0123456789="},
    "environments": [{"type": f"{TASKS}:Paced", "name": "math", "args": {"max_tokens": 8, "pace_s": 0.2}}],
    "sampling": {"max_tokens": 8},
    "batch": {"groups_per_step": 2, "group_size": 2, "bin_tokens": 256, "drop_no_signal": False},
    "staleness": {"max_age": 2},
    "leases": {"learner_s": 60, "member_s": 60},  # who stands still for a moment answers later
    "learner": {"steps": 10_000, "checkpoint_every": 2},
    "evaluation": {"tasks": 2},
    "worker": {"kv_cache_gb": 0.25},
    "device": "cpu",
}


def verb_of(command: Command) -> str:
    found = find_verb(VERBS, command.words[1:])
    assert found, command.line
    return found[0].words


def typed(*, alive: bool) -> list[Command]:
    """The commands without a mark, in the order of the pages."""
    free = [
        command for page in pages() for command in commands(page) if command.mark is None and command.words[0] == "async-rl"
    ]
    return [command for command in free if needs_a_living_run(command) == alive]


def needs_a_living_run(command: Command) -> bool:
    return verb_of(command) in OF_A_LIVING_RUN or command.words[1:3] in (["eval", "live"], ["top", "@"])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with what the pages speak of."""
    for name in ("configs", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(RUN))
    (tmp_path / "said.txt").write_text("2468\n")
    return tmp_path


def play(folder: Path, command: Command, words: Sequence[str]) -> None:
    if verb_of(command) in SERVERS:
        with program(folder, *words) as server:
            until(lambda: "http://" in server.output, f"{command.line} listens", while_alive=server)
            server.signal(signal.SIGINT)
            assert server.exit_code() in (0, 130), f"{command.place}: {command.line}\n{server.output}"
    else:
        done = finished(folder, *words)
        said = f"{command.place}: {command.line}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        assert done.returncode == 0 or stood_still(done), said
        assert "Traceback" not in done.stderr


@pytest.mark.timeout(1800)
def test_commands_about_a_run_that_has_ended(folder: Path) -> None:
    done = finished(folder, "run", "@", "run.yaml", "--run.name", ENDED, "--learner.steps", 2)
    assert done.returncode == 0, done.stdout + done.stderr
    run = folder / "runs" / ENDED
    shutil.copytree(run, kept := folder / "kept")
    shutil.copy(run / "config.yaml", folder / "copy.yaml")
    asked = typed(alive=False)
    assert {"audit", "checkpoints verify", "env check", "eval", "model export", "runs report", "trace", "view"} <= set(
        map(verb_of, asked)
    )
    for command in asked:
        if not run.exists():
            shutil.copytree(kept, run)
        play(folder, command, command.words[1:])


@pytest.mark.timeout(1800)
def test_commands_about_a_run_that_lives(folder: Path) -> None:
    asked = typed(alive=True)
    assert set(OF_A_LIVING_RUN) <= set(map(verb_of, asked))
    with program(folder, "run", "@", "run.yaml") as run:
        config = folder / "runs" / LIVING / "config.yaml"
        until(lambda: config.exists() and last_step(load(["@", str(config)])) >= 1, "the run trains", while_alive=run)
        for command in asked:
            play(folder, command, [re.sub(rf"\b{ENDED}\b", LIVING, word) for word in command.words[1:]])
        run.signal(signal.SIGTERM)
        assert run.exit_code() == 0, run.output
