"""Recorded events become lanes of a window: learner and run first, at most 64 workers, and no event without a place."""

from __future__ import annotations

from pathlib import Path

from async_rl.recording import Event, Recording
from async_rl.recording.events import write_event
from async_rl.view.recorded.lanes import MOST_LANES, read_lanes


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
    found = read_lanes(recording, end=100.0, seconds=10.0)
    assert [lane["name"] for lane in found["lanes"]] == ["run", "learner", "w"]
    assert found["lanes"][2]["bars"] == [("group", -2.0, 4.0, "group t1 of e: trained")]
    assert found["lanes"][0]["bars"][0][3] == "worker-1 restarted"
    assert [(push["version"], push["staged"], push["dropped"]) for push in found["pushes"]] == [(2, ["w"], {"x": "gone"})]
    assert found["left_out"] == 0


def test_many_workers_share_a_lane(tmp_path: Path):
    swaps = [Event(kind="swap", at=1.0, fields={"worker": f"w{index:03}", "version": 1}) for index in range(MOST_LANES + 9)]
    lanes = read_lanes(write(tmp_path, *swaps), end=2.0, seconds=10.0)["lanes"]
    assert len(lanes) == MOST_LANES + 1
    assert lanes[-1]["name"].startswith("9 ")
    assert sum(len(lane["bars"]) for lane in lanes) == len(swaps)
