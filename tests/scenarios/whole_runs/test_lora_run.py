"""A run with adapters as a user starts it: workers, learner and checkpoints agree on what was trained."""

from __future__ import annotations

from pathlib import Path

from async_rl.checkpoints.manifest import candidates, read_manifest
from tests.support.run_history import check
from tests.support.run_processes import audit, program, read_config, write_config

STEPS = 3


def test_a_run_with_adapters_is_whole(tmp_path: Path) -> None:
    path = write_config(
        tmp_path,
        "adapted",
        learner={"steps": STEPS, "checkpoint_every": 2, "lora": {"rank": 8}, "optimizer": {"learning_rate": 1e-2}},
    )
    config = read_config(path)
    with program(tmp_path, "run", "@", path) as run:
        assert run.exit_code() == 0, run.output
    check(config, steps=STEPS)
    assert audit(path)["clean"]
    policy = read_manifest(candidates(config.run_folder / "checkpoints")[0]).models["policy"]
    assert policy.adapters is not None
    assert all(name.endswith((".lora_A", ".lora_B")) for name in policy.parameters)
