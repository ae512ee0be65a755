"""Forty kills of writers, learners and servers, and forged journals that the auditor must detect."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.chaos import auditor
from tests.support.repository import module_command, module_environment

Line = dict[str, Any]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a round with 40 kills."""
    folder = tmp_path_factory.mktemp("chaos") / "kept"
    options = ("--round", 0, "--server", "valkey", "--report", folder.with_name("chaos.json"), "--keep", folder)
    command = module_command("tests.chaos.run", "--kills", 40, "--seed", 1, *options)
    ended = subprocess.run(command, env=module_environment(), capture_output=True, text=True, timeout=500, check=False)
    print(ended.stdout, ended.stderr)  # pytest shows it when the round was not clean
    assert ended.returncode == 0
    return folder / "round-000"


def test_forty_kills_lose_nothing_and_train_nothing_twice(killed: Path):
    outcome = json.loads((killed / "outcome.json").read_text())
    assert outcome["kills"] >= 40
    assert {death["role"].partition("-")[0] for death in outcome["deaths"]} == {"learner", "writer", "server"}
    assert any(death["how"] == "failpoint" for death in outcome["deaths"])
    assert json.loads((killed / "final.json").read_text())["state"]["spent"] != "0"
    assert auditor.main(killed) == 0
    report = json.loads((killed.parents[1] / "chaos.json").read_text())
    assert (report["kills"], sum(report["violations"].values())) == (outcome["kills"], 0)


def _lose_a_group(steps: list[Line]) -> None:
    steps[0]["groups"].pop()


def _train_twice(steps: list[Line]) -> None:
    for step in steps[1:4]:
        step["groups"][0] = steps[0]["groups"][0]


def _lose_a_step(steps: list[Line]) -> None:
    steps[1]["did"] = "forgotten"


def _reuse_a_version(steps: list[Line]) -> None:
    steps[1]["version"] = steps[0]["version"]


def _train_what_is_too_old(steps: list[Line]) -> None:
    steps[-1]["groups"][0]["oldest"] = -100


@pytest.mark.parametrize(
    ("forge", "said"),
    [
        (_lose_a_group, "tasks were begun and never finished"),
        (_train_twice, "trained twice: group"),
        (_lose_a_step, "the journals"),
        (_reuse_a_version, "versions: version"),
        (_train_what_is_too_old, "whose oldest token"),
    ],
)
def test_the_auditor_sees_a_forged_step(
    killed: Path, tmp_path: Path, forge: Callable[[list[Line]], None], said: str, capsys: pytest.CaptureFixture[str]
):
    folder = Path(shutil.copytree(killed, tmp_path / "forged", ignore=shutil.ignore_patterns("chaos")))
    lines = {path: [json.loads(line) for line in path.read_text().splitlines()] for path in (folder / "journals").iterdir()}
    first_life = next(path for path in sorted(lines) if path.name.startswith("learner") and _steps(lines[path]))
    forge(_steps(lines[first_life]))
    first_life.write_text("".join(json.dumps(line) + "\n" for line in lines[first_life]))
    _is_seen(folder, said, capsys)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"did": "live", "version": -5}, "saw version -5 live after"),
        (
            {"did": "ended", "ticket": "t999999999", "task": 0, "how": "commit", "answers": ["stored"]},
            "stored groups are gone",
        ),
        (
            {"did": "reserved", "ticket": "t000000000", "worker": "thief", "task": 0, "attempt": 1, "version": 0},
            "several workers",
        ),
    ],
)
def test_the_auditor_sees_a_forged_word_of_a_writer(
    killed: Path, tmp_path: Path, line: Line, said: str, capsys: pytest.CaptureFixture[str]
):
    folder = Path(shutil.copytree(killed, tmp_path / "forged", ignore=shutil.ignore_patterns("chaos")))
    final = json.loads((folder / "final.json").read_text())
    final["dropped"].pop("stale", None)
    final["state"]["quarantined"] = "0"
    (folder / "final.json").write_text(json.dumps(final))
    with sorted((folder / "journals").glob("writer-0.*"))[-1].open("a") as file:
        file.write(json.dumps({**line, "role": "writer-0", "life": 9999}) + "\n")
    _is_seen(folder, said, capsys)


@pytest.mark.parametrize(("counter", "said"), [("spent", "groups are spent"), ("issued", "tickets of")])
def test_the_auditor_sees_books_that_do_not_balance(
    killed: Path, tmp_path: Path, counter: str, said: str, capsys: pytest.CaptureFixture[str]
):
    folder = Path(shutil.copytree(killed, tmp_path / "forged", ignore=shutil.ignore_patterns("chaos")))
    final = json.loads((folder / "final.json").read_text())
    final["state"][counter] = str(int(final["state"][counter]) + 1)
    (folder / "final.json").write_text(json.dumps(final))
    _is_seen(folder, said, capsys)


def _steps(lines: list[Line]) -> list[Line]:
    """Return the steps of a life, if there are enough of them to forge some."""
    trained = [line for line in lines if line["did"] == "trained"]
    saved = max((line["step"] for line in lines if line["did"] == "saved"), default=0)
    survived = [line for line in trained if line["step"] <= saved]
    return survived if len(survived) >= 4 else []


def _is_seen(folder: Path, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert auditor.main(folder) == 1
    assert said in capsys.readouterr().out
