"""PPO as a user starts it: real programs, from prompts to a critic that foretells rewards and a policy that earns them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from async_rl.checkpoints.manifest import candidates, read_manifest
from async_rl.telemetry import read_rows
from tests.support.run_history import check
from tests.support.run_processes import audit, program, read_config, write_config

STEPS = 60


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("critic", ["own", "shared"])
def test_a_run_with_a_critic_learns(tmp_path: Path, critic: str) -> None:
    path = write_config(
        tmp_path,
        "ppo",
        model={"size": {"hidden": 64, "layers": 2, "heads": 4}},
        batch={"groups_per_step": 16, "group_size": 2, "bin_tokens": 512, "drop_no_signal": False},
        worker={"processes": 1, "groups_in_flight": 16},
        learner={
            "steps": STEPS,
            "checkpoint_every": 20,
            "objective": "ppo",
            "optimizer": {"learning_rate": 3e-3},
            "critic": {"type": critic} | ({"optimizer": {"learning_rate": 3e-3}} if critic == "own" else {}),
        },
    )
    config = read_config(path)
    with program(tmp_path, "run", "@", path) as run:
        assert run.exit_code() == 0, run.output
    check(config, steps=STEPS)
    assert audit(path)["clean"]
    assert ("critic" in read_manifest(candidates(config.run_folder / "checkpoints")[0]).models) == (critic == "own")
    rows = [row.values for row in read_rows(config.run_folder / "metrics.jsonl")]
    first, last = rows[:5], rows[-5:]
    assert _mean(last, "reward/mean") > _mean(first, "reward/mean") + 0.2
    assert _mean(last, "value/loss") < _mean(first, "value/loss") / 2


def _mean(rows: Sequence[Mapping[str, float]], name: str) -> float:
    return sum(row[name] for row in rows) / len(rows)
