"""What the page shows of a run: how it stands, and the evaluations of weights that are not gone."""

from __future__ import annotations

import fcntl
import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from async_rl.run_folders.state import LOCK
from async_rl.telemetry.evaluation_rows import read_evaluations
from async_rl.telemetry.rows import read_last_evaluation
from async_rl.view.live import LiveState
from async_rl.view.opened_run import open_folder
from async_rl.view.run_view import RunView
from tests.unit.async_rl.run_folders.stored_runs import store_run

LIVE = LiveState(
    live_version=3, learner="host:1", waits_for="", buffer={}, ages={}, limits={}, workers=(), notes=()
)  # fmt: skip


def evaluation(step: int, value: float) -> dict[str, Any]:
    return {
        "step": step + 1,
        "time": 1.0,
        "eval/step": step,
        "eval/version": step,
        "eval/counting/mean@1": value,
        "eval/counting/tasks": 3,
    }


def add(run: Path, *rows: dict[str, Any]) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def test_evaluations_of_weights_that_are_gone_leave_the_page(tmp_path: Path) -> None:
    run = store_run(tmp_path, "resumed", rewards=(0.5,)).path
    (run / "metrics.jsonl").unlink()
    add(run, evaluation(2, 0.2), evaluation(4, 0.4), evaluation(6, 0.6))
    with closing(RunView(open_folder(run))) as view:
        view.refresh()
        first = view.series([], points=10, since=0, server="")
        assert [each["step"] for each in first["evaluations"]] == [2, 4, 6]
        add(run, {"resumed_after": 4})
        view.refresh()
        then = view.series([], points=10, since=first["rows"], server=first["server"])
        assert then["evaluations_begin_anew"]
        assert [each["step"] for each in then["evaluations"]] == [2, 4] == [each["step"] for each in view.evaluations]
        add(run, evaluation(6, 0.7))
        view.refresh()
        last = view.series([], points=10, since=then["rows"], server=then["server"])
        assert not last["evaluations_begin_anew"]
        assert [each["step"] for each in last["evaluations"]] == [6]
    assert [row.step for row in read_evaluations(run / "metrics.jsonl")] == [2, 4, 6]
    add(run, {"resumed_after": 5})
    found = read_last_evaluation(run / "metrics.jsonl")
    assert found is not None
    assert found["eval/step"] == 4
    assert [row.step for row in read_evaluations(run / "metrics.jsonl")] == [2, 4]


@pytest.mark.parametrize(
    ("exit_code", "kind", "sentence"),
    [
        (0, "finished", "Finished: trained all 5 steps."),
        (12, "failed", "Failed: ended with exit code 12"),
        (None, "lost", "Lost: its processes are gone and did not say why (killed, or the machine stopped); its last row is "),
    ],
)
def test_the_page_says_how_a_run_stands_as_runs_show_does(
    tmp_path: Path, exit_code: int | None, kind: str, sentence: str
) -> None:
    run = store_run(tmp_path, "run", steps=5 if exit_code == 0 else 9, exit_code=exit_code)
    with closing(RunView(open_folder(run.path))) as view:
        view.refresh()
        shown = view.state("its Redis is not running")
        assert shown["kind"] == kind == run.state(run.last_row()).kind
        assert shown["sentence"].startswith(sentence)
        calm = "The run has ended, and with it its Redis, its learner and its workers."
        assert shown["live_problem"] == (calm if kind == "finished" else "its Redis is not running")
        with (run.path / LOCK).open() as supervisor:
            fcntl.flock(supervisor, fcntl.LOCK_EX)
            shown = view.state("its Redis is not running")
        assert shown["sentence"].startswith("Running: its supervisor runs on this machine; its last row is ")
        assert view.state(LIVE)["sentence"].startswith("Running: its Redis says that a learner has it; ")
