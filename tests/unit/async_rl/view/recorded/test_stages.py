"""Time in which code blocked a worker is no stage's: neither in a rollout's life nor in the means of all."""

from __future__ import annotations

from pathlib import Path

import pytest

from async_rl.recording import Event, Recording
from async_rl.recording.recorder import Recorder
from async_rl.view.recorded.rollouts import RolloutBrowser
from async_rl.view.recorded.stages import Block, blocked_s, blocks_by_worker
from tests.support.recorded_run import BEGAN, record_run

ROLLOUT = 7
"""Number of a group of worker-1: generation from 0.4 s to 2 s after its reservation, grading from 2.5 s to 3 s."""


def blocked(at: float, seconds: float, worker: str = "worker-1") -> Event:
    return Event(kind="blocked", at=at, seconds=seconds, fields={"worker": worker, "environment": "sums", "place": "sums.py:7"})


def test_a_block_that_was_reported_twice_is_one():
    reports = (blocked(10.0, 60.0), blocked(10.0, 5.0), blocked(90.0, 5.0), blocked(10.0, 5.0, "other"))
    found = blocks_by_worker(reports)
    assert [(block.start, block.stop) for block in found["worker-1"]] == [(10.0, 70.0), (90.0, 95.0)]
    assert blocked_s(60.0, 92.0, found["worker-1"]) == 12.0
    assert blocked_s(0.0, 5.0, [Block(start=10.0, stop=70.0, place="")]) == 0.0


def test_the_life_of_a_rollout_has_the_blocked_time_for_itself(tmp_path: Path):
    record_run(tmp_path, 12)
    browser = RolloutBrowser(Recording(tmp_path), None)
    before = browser.stages()
    with Recorder(tmp_path, "learner", events_bytes=2**20, rollouts_bytes=2**20) as recorder:
        recorder.add(blocked(BEGAN + ROLLOUT + 1.0, 5.0))
    rollout = RolloutBrowser(Recording(tmp_path), None).rollout(f"t{ROLLOUT:09d}/1")
    assert rollout is not None
    spans = {span["what"]: span for span in rollout["life"]}
    assert spans["inference"]["blocked_s"] == pytest.approx(1.0)
    assert spans["reward"]["blocked_s"] == pytest.approx(0.5)
    assert spans["rolled out"]["blocked_s"] == spans["queue"]["blocked_s"] == 0
    own = spans["blocked"]
    assert (own["start"] - BEGAN - ROLLOUT, own["stop"] - BEGAN - ROLLOUT) == (pytest.approx(1.0), pytest.approx(3.0))
    assert own["detail"] == "sums.py:7"
    means, after = dict(before["stages"]), dict(browser.stages()["stages"])
    assert (before["episodes"], "blocked" in means) == (36, False)
    assert after["inference"] < means["inference"]
    assert sum(after.values()) == pytest.approx(sum(means.values()))


def test_rollouts_are_listed_by_how_long_they_took(tmp_path: Path):
    record_run(tmp_path, 6)
    rows = RolloutBrowser(Recording(tmp_path), None).page({"order": "slowest"})["rows"]
    assert [row["seconds"] for row in rows] == [pytest.approx(2.9)] * 24, "from the first span to the last"
