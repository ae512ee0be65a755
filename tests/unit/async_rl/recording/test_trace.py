"""A window of recorded events as a trace that Perfetto opens."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from async_rl.cli.main import dispatch
from async_rl.errors import ConfigError
from async_rl.recording.clocks import WorkerClocks, boot_id
from async_rl.recording.recorder import Recorder

T = 1_767_225_600.0


def record_a_run(folder: Path) -> None:
    with Recorder(folder, "learner", events_bytes=10**6, rollouts_bytes=0) as kept:
        for step in range(1, 4):
            kept.event("step", at=T + 10 * step, seconds=4.0, step=step, version=step)
            kept.event("push", at=T + 10 * step + 4, seconds=1.0, version=step, staged=["w0"], dropped={})
            kept.event("swap", at=T + 10 * step + 5, seconds=0.5, worker="w0", version=step, how="push")
            kept.event("engine", at=T + 10 * step, seconds=1.0, worker="w0", running=3, waiting=1, tokens=500)
        spans = [["task", -1, 0.0, 0.5, -1, -1], ["inference", 0, 0.5, 3.0, 1, 2], ["inference", 0, 1.0, 2.0, 1, 1]]
        for number, start in enumerate((20.0, 21.0, 26.0)):
            about = {"group": f"t{number}", "worker": "w0", "fate": "trained", "spans": spans}
            kept.event("group", at=T + start, seconds=4.0, **about)
        kept.event("process", at=T + 25, name="worker-0", what="lost", pid=7, detail="was ended by SIGKILL")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    record_a_run(tmp_path / "runs" / "seen")
    file = tmp_path / "run.yaml"
    file.write_text(
        f"run: {{name: seen, folder: {tmp_path / 'runs'}}}\nmodel: {{size: {{hidden: 8, layers: 1, heads: 1}}}}\n"
        "environments: [{type: counting}]\n"
    )
    return file


def test_a_window_becomes_spans_of_lanes(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "trace.json"
    assert dispatch(["trace", "@", str(config), "--from", "10", "--seconds", "10", "--out", str(out)]) == 0
    assert "ui.perfetto.dev" in capsys.readouterr().out
    trace: dict[str, Any] = json.loads(out.read_text())
    events: list[dict[str, Any]] = trace["traceEvents"]
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    lanes = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert set(processes.values()) == {"learner", "w0", "run"}
    assert {event["ph"] for event in events} == {"M", "X", "i", "C"}
    for event in events:
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        if event["ph"] != "M":
            assert (event["pid"], event["tid"]) in lanes
            assert 0 <= event["ts"] <= event["ts"] + event.get("dur", 0) <= 10e6

    def spans(process: str, lane: str) -> list[tuple[str, float, float]]:
        wanted = {where for where, name in lanes.items() if name == lane and processes[where[0]] == process}
        return [
            (event["name"], event["ts"], event["dur"])
            for event in events
            if event["ph"] == "X" and (event["pid"], event["tid"]) in wanted
        ]

    # The first event, step 1, begins at T + 10, so the window is T + 20 ... T + 30.
    assert spans("learner", "steps") == [("step 2", 0, 4e6), ("step 3", 10e6, 0)]
    assert spans("learner", "weight pushes") == [("push version 2", 4e6, 1e6)]
    assert spans("w0", "weights") == [("swap version 2", 5e6, 0.5e6)]
    assert [name for name, *_ in spans("w0", "group 0")] == ["t0 (trained)", "t2 (trained)"], "t1 overlaps both"
    assert [name for name, *_ in spans("w0", "group 1")] == ["t1 (trained)"]
    assert spans("w0", "group 0, episode 0 (2)")[0] == ("inference", 1e6, 1e6), "two generations at once"
    by_lane = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            by_lane[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for taken in by_lane.values():
        ends = [begin >= end for (_, end), (begin, _) in zip(sorted(taken), sorted(taken)[1:], strict=False)]
        assert all(ends), "spans of a lane do not overlap"


def test_a_window_beyond_the_recording_is_one_sentence(config: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--from 99 is after the last recorded event; the recording has 26 s"):
        dispatch(["trace", "@", str(config), "--from", "99"])
    with pytest.raises(ConfigError, match=r"no recorded events; they are kept with recording.events_mb above 0"):
        dispatch(["trace", "@", str(config), "--run.name", "other"])


def test_a_clock_is_estimated_by_the_fastest_message() -> None:
    clocks = WorkerClocks()
    assert clocks.offset("w") == 0.0
    assert clocks.heard("w", sent_at=100.0, received_at=163.5)
    assert clocks.heard("w", sent_at=101.0, received_at=161.01), "the first message was slow"
    assert not clocks.heard("w", sent_at=102.0, received_at=164.0)
    assert clocks.offset("w") == pytest.approx(60.01)
    assert clocks.heard("here", sent_at=100.0, received_at=163.5, boot=boot_id())
    assert clocks.offset("here") == (0.0 if boot_id() else 63.5), "the same machine"
    for second in range(103, 180):
        clocks.heard("w", sent_at=second, received_at=second + 5.0)
    assert clocks.offset("w") == pytest.approx(5.0), "a clock that was set is followed"
