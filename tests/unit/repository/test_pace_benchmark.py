"""benchmarks/pace.py asks for valid runs, keeps what has finished, and prints medians beside those of full slots."""

from __future__ import annotations

import importlib
import json
import math
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType

import pytest

from async_rl.config.loading import load
from async_rl.recording.recorded import GroupFacts
from tests.support.repository import ROOT


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("pace")


SLOTS = {"rolled_out": 1.0, "ready": 0.5, "taken": 0.25, "trained": 1.0, "pushed": 0.25}


def rows(*rewards: float) -> list[dict[str, float]]:
    return [
        {"reward/mean": reward, "progress/wall_s": step / 2, "staleness/mean": 2.0, "staleness/in_queue": 0.5}
        for step, reward in enumerate(rewards, start=1)
    ]


def test_speed_and_age_are_those_after_the_warm_up_and_the_target_is_reached_by_a_window(benchmark: ModuleType) -> None:
    early = [{**row, "staleness/mean": 9.0} for row in rows(*[0.0] * 20)]
    later = [{**row, "progress/wall_s": 100.0 + row["progress/wall_s"]} for row in rows(0.8, *[0.9] * 4, 0.95, 0.9)]
    found = benchmark.result_of([*early, *later], SLOTS)
    assert (found.step_s, found.age, found.age_in_queue) == (0.5, 2.0, 0.5)
    assert (found.target_steps, found.target_s) == (26, 103.0)


def test_a_reward_that_is_not_reached_is_infinite(benchmark: ModuleType) -> None:
    found = benchmark.result_of(rows(*[0.5] * 30), SLOTS)
    assert math.isinf(found.target_s)
    assert math.isinf(found.target_steps)


@pytest.mark.parametrize("pace", ["sync", "2.5", "full", "auto"])
def test_every_world_is_a_valid_run(benchmark: ModuleType, tmp_path: Path, pace: str) -> None:
    for world in benchmark.WORLDS:
        run = benchmark.Run(world=world, pace=pace, seed=3, max_age=8)
        config = load(run.words(tmp_path))
        assert config.limits.age_bound == (0 if pace == "sync" else 8)
        assert str(config.staleness.pace) == ("full" if pace == "sync" else pace)
        assert (config.worker.groups_in_flight == 9 * config.batch.groups_per_step) == (world in benchmark.WAITING)


def test_finished_runs_are_reported_and_not_run_again(
    benchmark: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fast = benchmark.Result(step_s=0.2, age=3.0, age_in_queue=1.0, target_s=9.0, target_steps=40, reward=0.95, **SLOTS)
    slow = replace(fast, step_s=0.25, target_s=math.inf)
    data, result = tmp_path / "runs.jsonl", tmp_path / "result.json"
    with data.open("w") as file:
        for run in benchmark.asked("demo", ["full", "auto"], 3, 8.0):
            file.write(json.dumps(asdict(run) | asdict(fast if run.pace == "full" else slow) | {"load": 0.1}) + "\n")
    before = data.read_text()
    words = ["--seeds=3", "--paces", "full", "auto", "--data", str(data), "--json", str(result)]
    monkeypatch.setattr(sys, "argv", ["pace.py", *words])
    benchmark.main()
    assert data.read_text() == before, "nothing was missing, so nothing was run"
    assert (
        "| auto | 3 | 0.250 (0.250 to 0.250) | 0.80 (0.80 to 0.80) | 3.00 | 1.00 | inf | 40 | 0.950 | 1.0, 0.5, 0.2, 1.0, 0.2 |"
        in capsys.readouterr().out
    )
    assert json.loads(result.read_text())["pace_full_step_s"] == 0.2

    with data.open("a") as file:
        [other] = benchmark.asked("latency", ["full"], 1, 8.0)
        file.write(json.dumps(asdict(other) | asdict(slow)) + "\n")
    monkeypatch.setattr(sys, "argv", ["pace.py", "--report", "--data", str(data), "--json", str(result)])
    benchmark.main()
    shown, figures = capsys.readouterr().out, json.loads(result.read_text())
    assert shown.index("demo, max_age 8") < shown.index("latency, max_age 8")
    assert (figures["demo_pace_full_step_s"], figures["latency_pace_full_step_s"]) == (0.2, 0.25)


def test_a_state_holds_as_many_slots_as_groups_spend_steps_in_it(benchmark: ModuleType) -> None:
    slots = importlib.import_module("pace_parts.slots")
    groups = [
        GroupFacts(
            fate="trained",
            step=step,
            version_at_take=step - 1,
            reserved_at=10.0 * step,
            ready_at=10.0 * step + 15,
            taken_at=10.0 * step + 20,
            trained_from=10.0 * step + 21,
            trained_at=10.0 * step + 29,
        )
        for step in range(1, 6)
    ]
    live = {version: 10.0 * version + 31 for version in range(5) if version != 3}  # 3 was skipped; 5 never went live
    found = slots.states_of(groups, live, since_step=2)
    assert found == {"rolled_out": 1.5, "ready": 0.5, "taken": 0.1, "trained": 0.8, "pushed": pytest.approx((2 + 12 + 2) / 30)}


def test_a_pace_is_settled_when_it_stays_near_the_last_one(benchmark: ModuleType) -> None:
    changes = importlib.import_module("pace_changes")
    assert changes.settled_after([3.0] * 60) == 0
    assert changes.settled_after([8.0] * 10 + [3.0] * 50) == 9, "the first six steps whose mean is near 3"
    assert changes.settled_after([3.0] * 20 + [9.0] * 2 + [3.0] * 60) == 21


@pytest.mark.parametrize("change", ["lost", "joined", "slow"])
def test_every_change_happens_to_a_valid_run(benchmark: ModuleType, tmp_path: Path, change: str) -> None:
    changes = importlib.import_module("pace_changes")
    config = load(changes.words_of(change, tmp_path, 1))
    assert config.worker.processes == (1 if change == "joined" else 2)
    assert config.learner.steps == changes.STEPS
