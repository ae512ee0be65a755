"""Recorded events become lanes of a window: learner and run first, at most 64 workers, and no event without a place."""

from __future__ import annotations

from pathlib import Path

from async_rl.recording import Event, Recording
from async_rl.recording.events import write_event
from async_rl.view.recorded.lanes import MOST_BARS, MOST_LANES, PUSHES, read_lanes


def write(folder: Path, *events: Event) -> Recording:
    (folder / "events").mkdir()
    (folder / "events" / "learner-000001.jsonl").write_bytes(b"".join(write_event(event) + b"\n" for event in events))
    return Recording(folder)


def test_a_window_has_what_overlaps_it(tmp_path: Path):
    recording = write(
        tmp_path,
        Event(kind="step", at=80.0, seconds=1.0, fields={"step": 1}),
        Event(kind="group", at=88.0, seconds=4.0, fields={"worker": "w", "group": "t1", "environment": "e", "fate": "trained"}),
        Event(kind="push", at=95.0, seconds=0.5, fields={"version": 2, "bytes": 10, "staged": ["w"], "dropped": {"x": "gone"}}),
        Event(kind="process", at=96.0, process="run", fields={"name": "worker-1", "what": "restarted", "pid": 5}),
    )
    found = read_lanes(recording, begin=90.0, end=100.0)
    assert [lane["name"] for lane in found["lanes"]] == ["run", "learner", "w"]
    assert found["lanes"][2]["bars"] == [("group", -2.0, 4.0, "t1 of e: trained")]
    assert found["lanes"][0]["bars"][0][3] == "worker-1 restarted"
    assert [(push["version"], push["staged"], push["dropped"]) for push in found["pushes"]] == [(2, ["w"], {"x": "gone"})]
    assert (found["left_out"], found["recorded_from"]) == (0, 80.0)
    whole = read_lanes(recording, begin=None, end=100.0)
    assert (whole["begin"], whole["seconds"]) == (80.0, 20.0)
    assert whole["lanes"][1]["bars"][0] == ("step", 0.0, 1.0, "step 1")


def test_the_shortest_bars_are_left_out_and_never_blocked_code(tmp_path: Path):
    blocked = Event(kind="blocked", at=5.0, seconds=1.0, fields={"worker": "w", "environment": "e", "place": "tasks.py:3"})
    groups = [Event(kind="group", at=9.0, seconds=2.0 + index, fields={"worker": "w"}) for index in range(MOST_BARS + 5)]
    found = read_lanes(write(tmp_path, blocked, *groups), begin=0.0, end=10.0)
    [lane] = found["lanes"]
    assert found["left_out"] == 6
    assert lane["bars"][0] == ("blocked", 0.0, 1.0, "by e at tasks.py:3")
    assert min(seconds for kind, _, seconds, _ in lane["bars"] if kind == "group") == 8.0


def test_of_many_pushes_the_last_are_listed_and_all_are_counted(tmp_path: Path):
    pushes = [Event(kind="push", at=float(at), seconds=0.1, fields={"version": at, "wait_s": 0.5}) for at in range(PUSHES + 3)]
    found = read_lanes(write(tmp_path, *pushes), begin=None, end=100.0)
    assert (len(found["pushes"]), found["num_pushes"]) == (PUSHES, PUSHES + 3)
    assert (found["pushes"][-1]["version"], found["pushes"][-1]["wait_s"]) == (PUSHES + 2, 0.5)


def test_many_workers_share_a_lane(tmp_path: Path):
    swaps = [Event(kind="swap", at=1.0, fields={"worker": f"w{index:03}", "version": 1}) for index in range(MOST_LANES + 9)]
    lanes = read_lanes(write(tmp_path, *swaps), begin=None, end=2.0)["lanes"]
    assert len(lanes) == MOST_LANES + 1
    assert lanes[-1]["name"].startswith("9 ")
    assert sum(len(lane["bars"]) for lane in lanes) == len(swaps)
