"""What a run comes to, from the files it left."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from async_rl.cli.run_summary import read_samples, write_summary
from async_rl.config import Config
from async_rl.telemetry import open_sinks


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "here", "folder": tmp_path},
            "model": {"size": {"hidden": 32, "layers": 1, "heads": 4}},
            "environments": [{"type": "counting"}],
            "staleness": {"max_age": 3},
            "metrics": {"console": False},
        }
    )


EVALUATED = {
    "eval/held_out/tasks": 3,
    "eval/held_out/failed": 0.0,
    "eval/held_out/pass@1": 0.667,
    "eval/held_out/pass@1_low": 0.208,
    "eval/held_out/pass@1_high": 0.939,
    "eval/held_out/mean@1": 0.5,
}


def train(config: Config) -> None:
    with open_sinks(config) as sinks:
        for step in range(1, 11):
            ages = {"staleness/age_0": 1, "staleness/age_2": 3}
            progress = {"progress/tokens": 100 * step, "progress/samples": 8 * step, "progress/wall_s": 0.5 * step}
            progress["rollout/reward"] = step / 20
            progress |= {"idle/no_groups": step / 100, "idle/pushing": 0.01, "idle/checkpoint": 0.02, "idle/other": 0.0}
            sinks.log(step, {"reward/mean": step / 10, "staleness/mean": 1.5, "staleness/max": 2, **ages, **progress})
            sinks.log(step, {"weights/push_s": 0.1})
        for evaluated in (5, 10):  # the last rows of a run may hold several
            sinks.log(10, {"eval/step": evaluated, "eval/version": evaluated + 1, **EVALUATED})
    rows = [{"step": step, "prompt": f"{step}=", "text": "[bold]456", "reward": None, "age": 1} for step in range(1, 11)]
    (config.run_folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 11, "pro')


def printed(config: Config) -> tuple[Path | None, list[str]]:
    console = Console(file=io.StringIO(), width=100)
    path = write_summary(config, console, wall_s=17.3)
    assert isinstance(console.file, io.StringIO)
    return path, console.file.getvalue().splitlines()


def test_the_summary_counts_what_was_trained(config: Config) -> None:
    train(config)
    path, _ = printed(config)
    assert path is not None
    assert json.loads(path.read_text()) == {
        "run": "here",
        "steps": 10,
        "reward_first": pytest.approx(0.2),
        "reward_last": pytest.approx(0.9),
        "age_mean": 1.5,
        "age_max": 2,
        "max_age": 3,
        "age_histogram": {"0": 10, "2": 30},
        "tokens_trained": 1000,
        "samples_trained": 80,
        "reward_all_first": pytest.approx(0.1),
        "reward_all_last": pytest.approx(0.45),
        "wall_s": 17.3,
        "training_s": 5.0,
        "idle": pytest.approx({"no_groups": 0.055, "pushing": 0.01, "checkpoint": 0.02, "other": 0.0}),
        "evaluations": [
            {
                "step": step,
                "version": step + 1,
                "environments": {
                    "held_out": {
                        "tasks": 3,
                        "measures": {
                            "pass@1": {"mean": 0.667, "low": 0.208, "high": 0.939},
                            "mean@1": {"mean": 0.5, "low": None, "high": None},
                        },
                    }
                },
            }
            for step in (5, 10)
        ],
    }


def test_the_last_printed_line_is_the_path(config: Config) -> None:
    train(config)
    path, lines = printed(config)
    assert lines[-1] == str(path)
    text = "\n".join(lines)
    assert "reward 0.200 -> 0.900" in text
    assert "evaluation of step 10: held_out  pass@1 0.667 [0.208, 0.939]  mean@1 0.500  (3 tasks)" in text
    assert "reward of all episodes, trained or not: 0.100 -> 0.450" in text
    assert "in 10 steps, 17 s (training 5 s)" in text
    assert "the learner was idle 8.5% of the time: no groups ready 5.5%, pushing 1.0%, checkpoint 2.0%, other 0.0%" in text
    assert "[bold]456" in text, "what a model says is shown as it is"
    assert "1=" in text
    assert "10=" in text


def test_a_picture_is_drawn(config: Config) -> None:
    pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")
    train(config)
    printed(config)
    assert (config.run_folder / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_without_a_step_there_is_nothing_to_sum_up(config: Config) -> None:
    path, lines = printed(config)
    assert path is None
    assert lines == ["No step was trained, so there is no summary."]


def test_a_sample_that_a_crash_cut_is_passed_over(config: Config) -> None:
    train(config)
    assert len(read_samples(config.run_folder / "samples.jsonl")) == 10
