"""Runs are listed, shown, compared and removed from what they left in their folders."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

import pytest

from async_rl.cli.main import dispatch
from async_rl.errors import ConfigError
from async_rl.run_folders.folder import RunFolder
from async_rl.run_folders.state import RunEnd, decide_state
from async_rl.run_folders.waits_for import waits_for
from async_rl.telemetry.rows import JsonlSink
from tests.support.waiting import PATIENCE_S
from tests.unit.async_rl.run_folders.stored_runs import row_of, store_run, warn


def said(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert dispatch([str(word) for word in words]) == 0
    return capsys.readouterr().out


def document(capsys: pytest.CaptureFixture[str], *words: object) -> Any:
    return json.loads(said(capsys, *words, "--json"))


def test_a_list_says_how_each_run_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, trained, exit_code in (("done", 5, 0), ("halted", 3, 0), ("broke", 2, 12), ("gone", 2, None)):
        store_run(tmp_path, name, trained=trained, exit_code=exit_code)
    listed = {each["run"]: (each["state"], each["how"]) for each in document(capsys, "runs", "ls", "--run.folder", tmp_path)}
    assert listed["done"] == ("finished", "trained all 5 steps")
    assert listed["halted"] == ("stopped", "was stopped after step 3")
    assert listed["broke"] == ("failed", "ended with exit code 12 (RestartLimit)")
    assert listed["gone"][0] == "lost"
    with (tmp_path / "gone" / "run.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        text = said(capsys, "runs", "ls", "--run.folder", tmp_path)
    lines = {line.split()[0]: line for line in text.splitlines()}
    assert "running" in lines["gone"]
    assert "2/5" in lines["gone"]
    assert "counting mean@1 0.500" in lines["done"]
    assert "1.5 (max 2)" in lines["done"]


@pytest.mark.parametrize(
    ("known", "kind"),
    [
        ({"is_supervised": True}, "running"),
        ({"end": RunEnd(exit_code=0, time=50), "last_row": 40.0, "step": 9}, "finished"),
        ({"end": RunEnd(exit_code=0, time=50), "last_row": 90.0, "step": 5}, "running"),  # continued by hand
        ({"last_row": 90.0, "step": 5, "was_supervised": False}, "running"),
        ({"last_row": 90.0, "step": 5}, "lost"),
        ({"last_row": -900.0, "step": 9}, "finished"),
        ({"was_supervised": False}, "empty"),
        ({}, "lost"),
    ],
)
def test_states(known: dict[str, Any], kind: str) -> None:
    unknown: dict[str, Any] = {"is_supervised": False, "was_supervised": True, "end": None, "step": None, "last_row": None}
    assert decide_state(**{**unknown, **known}, steps=9, now=100.0).kind == kind


def test_one_run_is_shown_with_its_figures_warnings_and_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store_run(tmp_path, "done", environments=[{"type": "counting", "args": {"api_key": "hush"}}])
    text = said(capsys, "runs", "show", "done", "--run.folder", tmp_path)
    assert "run done: finished, trained all 5 steps" in text
    assert "evaluation of step 5: counting  mean@1 0.500 [0.250, 0.750]  (3 tasks)" in text
    assert "warning, 2 times" in text
    assert "learner: the worker w2 was blocked for 7 s" in text
    assert "metrics, a row per step" in text
    assert "hush" not in repr(RunFolder(path=tmp_path / "done").config)


def test_runs_are_compared_task_by_task(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store_run(tmp_path, "one", rewards=(0.0, 0.5, 0.25, 0.5))
    store_run(tmp_path, "two", rewards=(0.25, 0.75, 0.5, 0.76), staleness={"max_age": 7})
    found = document(capsys, "runs", "compare", "one", "two", "--run.folder", tmp_path)
    assert found["settings"]["staleness.max_age"] == [2.0, 7.0]
    assert "run.name" not in found["settings"]
    assert found["figures"]["one"]["reward/mean"] == pytest.approx(0.4)
    assert found["figures"]["one"]["progress/tokens"] == 500
    (pair,) = found["paired"]["two"]
    assert pair["difference"]["mean"] == pytest.approx(0.2525)
    assert pair["difference"]["low"] > 0, "the interval of the differences, not of the means"
    text = said(capsys, "runs", "compare", "one", "two", "--run.folder", tmp_path)
    assert "paired difference over 4 tasks 0.253" in text
    assert "the interval excludes 0" in text


def test_only_an_ended_run_is_removed_and_only_by_its_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    snapshots = tmp_path / "snapshots"
    outside = {"url": "redis://127.0.0.1:1/0"}
    run = store_run(tmp_path / "runs", "done", wire={"snapshots": str(snapshots)}, redis=outside)
    (snapshots / "done").mkdir(parents=True)
    (snapshots / "other").mkdir()
    place = ("--run.folder", str(tmp_path / "runs"))
    for name in ("don", "*", str(run.path)):
        with pytest.raises(ConfigError, match="give its name exactly"):
            dispatch(["runs", "rm", name, *place])
    for lock in ("run.lock", "redis/server.lock"):
        (run.path / lock).parent.mkdir(exist_ok=True)
        with (run.path / lock).open("w") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            with pytest.raises(ConfigError, match="is running"):  # before its keys are erased
                dispatch(["runs", "rm", "done", *place])
    (tmp_path / "runs" / "link").symlink_to(run.path)
    with pytest.raises(ConfigError, match="is a link to"):
        dispatch(["runs", "rm", "link", *place])
    (tmp_path / "copies").mkdir()
    shutil.copytree(run.path, copied := tmp_path / "copies" / "done")
    for words, what in (((), "its snapshots in .* and its keys in Redis"), (("--keep-redis",), "its snapshots in [^ ]*")):
        with pytest.raises(
            ConfigError, match=rf"^{copied} is a copy of {run.path}, or was moved: {what} are those of the run there"
        ):
            dispatch(["runs", "rm", "done", "--run.folder", str(copied.parent), *words])
    assert "would be removed" in said(capsys, "runs", "rm", "done", *place, "--dry-run")
    assert run.path.exists()
    assert f"{run.path} is removed" in said(capsys, "runs", "rm", "done", *place, "--keep-redis")
    assert not run.path.exists()
    assert [path.name for path in snapshots.iterdir()] == ["other"]


def test_top_draws_a_frame_into_a_pipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = store_run(tmp_path, "count-20260101-000000", trained=3, exit_code=None)
    (tmp_path / "count.yaml").write_text(f"run: {{folder: {tmp_path}}}")
    warn(run.path, "the answer was \x1b[2J")
    with (run.path / "run.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        text = said(capsys, "top", "@", tmp_path / "count.yaml", "--once")
    assert "step 3/5   elapsed 0:06   left 0:04" in text
    assert "no engine generates: environments, tools or graders hold them" in " ".join(text.split())
    assert "reward/mean 0.3  ▁▅█" in text
    assert "no groups ready 40%" in text
    assert "was blocked for 7 s" in text
    assert "the answer was ␛[2J" in text
    with pytest.raises(ConfigError, match="top needs a run"):
        dispatch(["top", "--run.folder", str(tmp_path)])


def test_top_on_a_terminal_follows_the_run_and_the_size_until_q(tmp_path: Path) -> None:
    run = store_run(tmp_path, "here", trained=3, exit_code=None)
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (40, 100))
    words = [sys.executable, "-c", "from async_rl.cli.main import main; main()", "top", "here", "--run.folder", str(tmp_path)]
    seen = b""

    def read_until(text: str) -> None:
        nonlocal seen
        until = time.monotonic() + 60
        while text not in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen.decode(errors="replace")):
            ready, _, _ = select.select([ours], [], [], max(0.0, until - time.monotonic()))
            assert ready, f"{text!r} is not drawn: {seen[-5000:]!r}"
            seen += os.read(ours, 65536)

    with subprocess.Popen(words, stdin=theirs, stdout=theirs, env={**os.environ, "TERM": "xterm", "COLUMNS": ""}) as process:
        try:
            read_until("step 3/5")
            read_until("lost " + 80 * "─")
            sink = JsonlSink(run.metrics, resumed_after=3, max_bytes=10**6)
            sink.log(4, row_of(4))
            sink.close()
            read_until("step 4/5")
            seen = b""
            termios.tcsetwinsize(theirs, (40, 60))
            read_until("lost " + 40 * "─")
            os.write(ours, b"xq")
            assert process.wait(PATIENCE_S) == 0
        finally:
            process.kill()
    os.close(ours)
    os.close(theirs)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"idle/pushing": 0.6, "weights/push_s": 2.5, "weights/workers": 3}, "the last took 2.5 s to 3 workers"),
        ({"idle/checkpoint": 0.6, "checkpoint/stall_s": 4}, "the last blocked it for 4.0 s"),
        ({"idle/other": 0.6}, "other work 60% of its time"),
        ({"rollout/workers": 0}, "no worker is present"),
        (
            {"time/wait_data": 3.0, "time/step": 0.1, "weights/push_s": 2.9},
            "2 workers had to wait for weights: the last push took 2.9 s",
        ),
        ({"time/wait_data": 3.0, "time/step": 0.1, "weights/push_s": 0.6, "engine/running": 5}, "too few for its pace"),
        ({"rollout/inflight": 0}, "2 workers roll out nothing"),
        ({"rollout/inflight": 0, "buffer/depth": 3}, "3 are ready, fewer than a step needs"),
        ({"engine/running": 5}, "too few for its pace"),
        ({"engine/running": 5, "engine/waiting": 9}, "9 generations wait for room in the engines, 5 run"),
        ({"idle/no_groups": 0.02}, "nothing: the learner trained 92% of the time"),
        (
            {"idle/no_groups": 0.02, "pace/slots": 8, "buffer/slots_used": 8, "buffer/depth": 8, "rollout/inflight": 0},
            "the workers wait for the learner: all 8 slots are used",
        ),
    ],
)
def test_what_a_run_waits_for(changed: dict[str, float], said: str) -> None:
    assert said in waits_for([{**row_of(1), **changed}])
