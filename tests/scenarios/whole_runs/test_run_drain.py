"""SIGTERM and Ctrl-C end a run in order, and starting it again goes on from there."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from async_rl.checkpoints.manifest import candidates, read_manifest
from tests.support.run_history import check, last_step, lives, surviving
from tests.support.run_processes import audit, program, read_config, write_config
from tests.support.waiting import until

NEVER = 1_000_000


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_drained_run_keeps_its_work_and_goes_on_when_it_is_started_again(tmp_path: Path, number: signal.Signals) -> None:
    marker = tmp_path / "hangs"
    path = write_config(
        tmp_path,
        "drained",
        tasks={"hangs_at": 9, "marker": str(marker)},
        learner={"steps": 60, "checkpoint_every": NEVER},
        worker={"drain_s": 1},
        leases={"ticket_s": 600},  # the ticket of the task that hangs comes back because it is handed back
    )
    config = read_config(path)
    with program(tmp_path, "run", "@", path) as run:
        until(lambda: marker.exists() and last_step(config) >= 3, "a worker hangs", while_alive=run)
        run.signal(number)
        assert run.exit_code() == 0, run.output
    assert "Traceback" not in run.output
    drained_after = surviving(lives(config))[-1].number
    assert 3 <= drained_after < 60
    (saved,) = candidates(config.run_folder / "checkpoints")
    assert read_manifest(saved).step == drained_after
    said = audit(path)
    assert said["clean"]
    assert said["stats"]["reserved"] == 0
    # The task that hangs was handed back, and maybe others that were too slow for so short a grace.
    assert said["stats"]["dropped"].keys() == {"abandoned"}

    with program(tmp_path, "run", "@", config.run_folder / "config.yaml", "--learner.steps", drained_after + 4) as again:
        assert again.exit_code() == 0, again.output
    assert [life.resumed_after for life in lives(config)] == [0, drained_after]
    check(config, steps=drained_after + 4)
