"""A run with adapters as a user starts it: workers, learner and checkpoints agree on what was trained."""

from __future__ import annotations

from pathlib import Path

import pytest

from async_rl.checkpoints.manifest import candidates, read_manifest
from async_rl.telemetry import read_rows
from tests.support.run_history import check
from tests.support.run_processes import audit, program, read_config, write_config

MANY = 80


@pytest.mark.timeout(900)
@pytest.mark.parametrize("steps", [3, pytest.param(MANY, marks=pytest.mark.slow)])
def test_a_run_with_adapters_learns(tmp_path: Path, steps: int) -> None:
    path = write_config(
        tmp_path,
        "adapted",
        model={"size": {"hidden": 64, "layers": 2, "heads": 4}},
        batch={"groups_per_step": 8, "group_size": 4, "bin_tokens": 512, "drop_no_signal": False},
        worker={"processes": 1, "groups_in_flight": 16},
        learner={"steps": steps, "checkpoint_every": 2, "lora": {"rank": 8}, "optimizer": {"learning_rate": 1e-2}},
    )
    config = read_config(path)
    with program(tmp_path, "run", "@", path) as run:
        assert run.exit_code() == 0, run.output
    check(config, steps=steps)
    assert audit(path)["clean"]
    policy = read_manifest(candidates(config.run_folder / "checkpoints")[0]).models["policy"]
    assert policy.adapters is not None
    assert all(name.endswith((".lora_A", ".lora_B")) for name in policy.parameters)
    rewards = [row.values["reward/mean"] for row in read_rows(config.run_folder / "metrics.jsonl")]
    if steps == MANY:
        assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.2
