"""`async-rl train` as a user starts it: stopped, killed and resumed, it comes to the weights of an uninterrupted run."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import torch
import yaml
from safetensors import safe_open

from async_rl.checkpoints.manifest import candidates, read_manifest
from async_rl.config.training import TrainingConfig
from async_rl.durable.failpoints import ORDERS
from async_rl.telemetry import read_rows
from tests.scenarios.training.train_stage import config, run
from tests.support.run_processes import program

NEVER = 1_000_000


def write(folder: Path, config: TrainingConfig) -> Path:
    path = folder / f"{config.run.name}.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    return path


def checkpointed(folder: Path) -> dict[str, torch.Tensor]:
    """All that the newest checkpoint holds."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(candidates(folder)[0].glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return found


@pytest.mark.slow
def test_stopped_and_killed_it_ends_like_an_uninterrupted_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_section = {"name": "it", "folder": str(tmp_path / "runs")}
    learner = {"steps": NEVER, "checkpoint_every": 2}
    path = write(tmp_path, config("dpo", run=run_section, learner=learner, metrics={"console": True}))
    folder = tmp_path / "runs" / "it"
    with program(tmp_path, "train", "dpo", "@", path) as first:
        first.until_says("step 3/")
        first.signal(signal.SIGINT)
        assert first.exit_code() == 0, first.output
    assert "Traceback" not in first.output
    stopped_after = read_manifest(candidates(folder / "checkpoints")[0]).step
    assert stopped_after >= 3

    # the second checkpoint from here on, which is the last one, kills the process that writes it; its supervisor starts another
    monkeypatch.setenv(ORDERS, "checkpoint.written:2")
    steps = (stopped_after // 2 + 2) * 2
    with program(tmp_path, "train", "dpo", "@", folder / "config.yaml", "--learner.steps", steps) as second:
        assert second.exit_code() == 0, second.output
    assert "learner was ended by SIGKILL" in second.output
    assert second.output.count("resumes from step") == 2
    assert second.output.strip().endswith(str(folder / "summary.json"))

    uninterrupted = config("dpo", run=run_section, learner={**learner, "steps": steps})
    notes, _ = run(uninterrupted, tmp_path / "uninterrupted")
    found, expected = checkpointed(folder / "checkpoints"), checkpointed(tmp_path / "uninterrupted" / "checkpoints")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)

    rows = [row for row in read_rows(folder / "metrics.jsonl") if "train/loss" in row.values]
    assert [row.step for row in rows] == list(range(1, steps + 1))
    assert [row.values["train/loss"] for row in rows] == [row["loss"] for row in notes.rows]
    assert rows[-1].values["progress/samples"] == 9 * steps
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["method"], summary["steps"]) == ("dpo", steps)
    assert {"loss", "accuracy"} <= summary["held_out_last"].keys()


@pytest.mark.slow
def test_ranks_stop_together_and_a_mistake_is_one_sentence(tmp_path: Path) -> None:
    sections = {"run": {"name": "two", "folder": str(tmp_path / "runs")}, "metrics": {"console": True}}
    path = write(tmp_path, config("sft", **sections, learner={"steps": NEVER, "parallel": {"processes": 2}}))
    with program(tmp_path, "train", "sft", "@", path) as ranks:
        ranks.until_says("step 2/")
        ranks.signal(signal.SIGTERM)
        assert ranks.exit_code() == 0, ranks.output
    assert "Traceback" not in ranks.output
    assert read_manifest(candidates(tmp_path / "runs" / "two" / "checkpoints")[0]).layout.data == 2

    (tmp_path / "bad.jsonl").write_text('{"prompt": "3="}\n')
    with program(tmp_path, "train", "sft", "@", path, "--run.name", "bad", "--data.path", "bad.jsonl") as bad:
        assert bad.exit_code() == 2, bad.output
    assert f"{tmp_path}/bad.jsonl:1: has the columns prompt; needed are prompt and response" in bad.output
    assert "Traceback" not in bad.output
