"""A run that loses a checkpoint, or its server and the server's clock, goes on without losing a task or a later checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path

from async_rl.checkpoints.manifest import candidates, place_of
from tests.support.run_history import check, lives
from tests.support.run_processes import audit, program, read_config, write_config

FAR_AHEAD = 9_000_000_000_000
"""As a fence: the milliseconds of a clock that is ahead."""


def test_a_run_survives_a_damaged_checkpoint_and_an_emptied_server(tmp_path: Path) -> None:
    def goes_on_to(steps: int) -> str:
        path = write_config(tmp_path, "forgetful", learner={"steps": steps, "checkpoint_every": 3})
        with program(tmp_path, "run", "@", path) as run:
            assert run.exit_code() == 0, run.output
        assert "Traceback" not in run.output
        return run.output

    path = write_config(tmp_path, "forgetful", learner={"steps": 6, "checkpoint_every": 3})
    config = read_config(path)
    saves = config.run_folder / "checkpoints"
    goes_on_to(6)
    assert [place_of(each) for each in candidates(saves)] == [(1, 6), (1, 3)]
    (rank,) = candidates(saves)[0].glob("rank-*.safetensors")
    rank.write_bytes(rank.read_bytes()[:-1])

    said = goes_on_to(9)
    assert "6 groups that it contained are lost" in said
    assert [(life.resumed_after, life.lost) for life in lives(config)] == [(0, 0), (3, 6)]
    check(config, steps=9)
    books = audit(path)
    assert (books["clean"], books["stats"]["lost_to_rollback"]) == (True, 6)

    shutil.rmtree(config.run_folder / "redis")
    for each in candidates(saves):
        life, step = place_of(each)
        each.rename(saves / f"step-{step:08d}-by-{FAR_AHEAD + life}")
    goes_on_to(12)
    assert [place_of(each) for each in candidates(saves)] == [(FAR_AHEAD + 3, 12), (FAR_AHEAD + 2, 9)]
    assert lives(config)[-1].fence == FAR_AHEAD + 3
    check(config, steps=12)
