"""The episodes of one worker as lanes: side by side where they overlapped, below the load of its engine."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from async_rl.recording import Event, Recording
from async_rl.recording.recorder import Recorder
from async_rl.view.recorded.episodes import read_episodes
from async_rl.view.recorded.lanes import read_lanes
from tests.support.recorded_run import BEGAN, record_run

SIBLINGS = 4


def engine(at: float, worker: str, running: int) -> Event:
    return Event(kind="engine", at=at, seconds=1.0, fields={"worker": worker, "running": running, "waiting": 2, "tokens": 30})


def test_episodes_that_overlap_have_lanes_of_their_own(tmp_path: Path):
    record_run(tmp_path, 12)
    with Recorder(tmp_path, "learner", events_bytes=2**20, rollouts_bytes=2**20) as recorder:
        recorder.add(engine(BEGAN + 1, "worker-1", 3))
        recorder.add(engine(BEGAN + 1, "worker-0", 5))
    lanes, left_out = read_episodes(Recording(tmp_path), "worker-1", begin=BEGAN, end=BEGAN + 60)
    assert lanes[0] == {"name": "engine", "bars": [("engine", 1.0, 1.0, "3 generations, 2 wait, 30 tokens")]}
    bars = [bar for lane in lanes[1:] for bar in lane["bars"]]
    assert left_out == 0
    assert {kind for kind, *_ in bars} == {"queue", "inference", "environment", "reward"}
    first = [bar for bar in bars if bar[3] == "t000000001, episode 2"]
    assert [(kind, seconds) for kind, _, seconds, _ in first] == [
        ("queue", 0.3), ("inference", 1.6), ("environment", 0.5), ("reward", 0.5),
    ]  # fmt: skip
    assert not any("t000000002" in text for *_, text in bars), "that group is of the other worker"
    assert len(lanes) > SIBLINGS
    for lane in lanes[1:]:
        ends = [(begin, begin + seconds) for _, begin, seconds, _ in lane["bars"]]
        assert all(stop <= start + 1e-3 for (_, stop), (start, _) in itertools.pairwise(ends)), lane["name"]


def test_without_recorded_rollouts_the_events_have_the_stages(tmp_path: Path):
    with Recorder(tmp_path, "learner", events_bytes=2**20, rollouts_bytes=0) as recorder:
        spans = [["queue", 0, 0.0, 0.5, -1, -1], ["inference", 0, 0.5, 2.0, 3, 4], ["task", -1, 0.0, 0.1, -1, -1]]
        fields = {"group": "t1", "worker": "w", "environment": "e", "fate": "trained", "spans": spans}
        recorder.add(Event(kind="group", at=BEGAN, seconds=2.0, fields=fields))
    lanes, _ = read_episodes(Recording(tmp_path), "w", begin=BEGAN, end=BEGAN + 10)
    assert [lane["bars"] for lane in lanes] == [
        [("task", 0.0, 0.1, "t1, all episodes")],
        [("queue", 0.0, 0.5, "t1, episode 0"), ("inference", 0.5, 1.5, "t1, episode 0")],
    ]


@pytest.mark.parametrize("worker", ["worker-1", "nobody"])
def test_the_lanes_of_one_worker_are_its_own(tmp_path: Path, worker: str):
    record_run(tmp_path, 12)
    lanes = read_lanes(Recording(tmp_path), begin=None, end=BEGAN + 60, worker=worker)["lanes"]
    assert [lane["name"] for lane in lanes] == ([worker] if worker == "worker-1" else [])
