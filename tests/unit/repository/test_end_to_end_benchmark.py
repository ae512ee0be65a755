"""benchmarks/end_to_end.py finds the moment at which a run has learned its task, and leaves no run behind."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from async_rl.config import Config
from async_rl.config.loading import load
from rollout_workers.registry import build_agent
from tests.support.repository import ROOT

BENCHMARKS = ROOT / "benchmarks"

# Stands in for `async-rl run`: logs the rewards that it is given, then ends, or trains on until it is told to stop.
RUN = """
import json, pathlib, signal, sys
rewards, ends_by_itself = json.loads(sys.argv[1]), sys.argv[2] == "ends"
options = dict(zip(sys.argv[6::2], sys.argv[7::2], strict=True))
folder = pathlib.Path(options["--run.folder"], options["--run.name"])
folder.mkdir()
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
with (folder / "metrics.jsonl").open("w") as file:
    for step, reward in enumerate(rewards, start=1):
        row = {"step": step, "reward/mean": reward, "progress/samples": 64 * step, "progress/wall_s": step / 2}
        file.write(json.dumps(row) + chr(10))
    file.write('{"step": 99, "rew')
    file.flush()
    print("the last words")
    if not ends_by_itself:
        signal.sigwait([signal.SIGTERM])
        (folder / "drained").touch()
"""


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("end_to_end")


def rows(*rewards: float) -> list[dict[str, float]]:
    return [
        {"reward/mean": reward, "progress/samples": 64 * step, "progress/wall_s": step / 2}
        for step, reward in enumerate(rewards, start=1)
    ]


@pytest.mark.parametrize(
    ("rewards", "step"),
    [
        ((), None),
        ((1.0, 1.0), None),
        ((0.9, 0.9, 0.9), 3),
        ((0.1, 0.95, 0.95, 0.7, 0.95, 0.95, 1.0), 7),
        ((0.1, 0.8, 0.89, 0.95), None),
        ((0.1, 1.0, 1.0, 1.0, 0.0, 0.0), 4),
    ],
)
def test_reached_is_the_first_step_whose_window_averages_the_target(
    benchmark: ModuleType, rewards: tuple[float, ...], step: int | None
) -> None:
    expected = None if step is None else benchmark.Result(wall_s=step / 2, samples=64 * step, steps=step)
    assert benchmark.reached(rows(*rewards)) == expected


def test_rows_without_a_reward_are_no_steps(benchmark: ModuleType) -> None:
    found = benchmark.reached([{"progress/wall_s": 0.1}, *rows(1.0, 1.0), {"progress/wall_s": 1.1}, *rows(1.0)])
    assert found is not None
    assert found.steps == 3


def test_a_run_is_drained_once_it_reached_the_target(benchmark: ModuleType, tmp_path: Path) -> None:
    result = benchmark.run_ours([sys.executable, "-c", RUN, "[0.5, 0.9, 0.9, 0.9, 0.9]", "goes on"], tmp_path, seed=3)
    assert result == benchmark.Result(wall_s=2.0, samples=256, steps=4)
    assert [path.parent.name.endswith("-seed3") for path in tmp_path.glob("*/drained")] == [True]


def test_a_run_that_ends_too_early_is_reported_with_its_last_words(benchmark: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(benchmark.NotReached, match=r"before reward 0\.9(.|\n)*the last words"):
        benchmark.run_ours([sys.executable, "-c", RUN, "[0.5, 0.9, 0.9]", "ends"], tmp_path, seed=0)


def test_the_configuration_is_valid_and_can_be_handed_to_the_rival(benchmark: ModuleType) -> None:
    config = Config.model_validate(yaml.safe_load(benchmark.CONFIG.read_text()))
    flags = benchmark.shared_facts(config)
    assert "--learning-rate=0.001" in flags
    assert "--max-tokens=32" in flags
    assert {environment.args["max_tokens"] for environment in config.environments} == {config.sampling.max_tokens}


def test_episodes_wait_on_both_sides_and_differ_in_nothing_else(benchmark: ModuleType) -> None:
    latency = benchmark.Latency(median_s=0.25, max_age=4.0)
    plain = Config.model_validate(yaml.safe_load(benchmark.CONFIG.read_text()))
    waiting = load(["@", str(benchmark.CONFIG), *latency.overrides(plain)])
    assert latency.flags == ["--wait-median=0.25", "--wait-sigma=1.0"]
    assert benchmark.shared_facts(waiting) == benchmark.shared_facts(plain)
    assert waiting.staleness.max_age == 4
    environment: Any = build_agent(waiting.environments[0], seed=1)
    assert environment.max_tokens == waiting.sampling.max_tokens
    assert (environment.median_s, environment.sigma) == (0.25, 1.0)


def test_ratios_are_ours_over_theirs(benchmark: ModuleType) -> None:
    ours = [benchmark.Result(wall_s=wall_s, samples=64, steps=1) for wall_s in (9.0, 1.0, 2.0)]
    theirs = [benchmark.Result(wall_s=4.0, samples=128, steps=2)]
    found = benchmark.compare(ours, theirs)
    assert (found["wall_s"], found["trl_wall_s"], found["wall_vs_trl"], found["samples_vs_trl"]) == (2.0, 4.0, 0.5, 0.5)
    assert set(benchmark.compare(ours, [])) == {"wall_s", "samples", "steps"}
