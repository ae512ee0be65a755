"""A failure on one rank ends all ranks, and older checkpoints stay."""

from pathlib import Path

from async_rl.checkpoints.manifest import candidates, check_files, read_manifest
from async_rl.errors import CheckpointError, ServiceStopped
from tests.support.warm_processes import run_ranks


def test_a_full_disk_on_one_rank_costs_a_checkpoint_and_neither_training_nor_the_older_one(tmp_path: Path) -> None:
    leader, follower = run_ranks("tests.support.learner_rank", "full_disk", tmp_path)
    assert [leader.returncode, follower.returncode] == [CheckpointError.exit_code, 0], leader.stderr + follower.stderr
    assert "could not write a checkpoint: rank 1: [Errno 27] File too large; older checkpoints are untouched" in leader.stderr
    [survivor] = candidates(tmp_path / "checkpoints")
    assert [path.name for path in survivor.parent.iterdir()] == [survivor.name], "what was written takes up room"
    manifest = read_manifest(survivor)
    assert manifest.step == 0
    check_files(survivor, manifest, manifest.files)


def test_a_rank_that_rank_0_deserted_ends_by_itself(tmp_path: Path) -> None:
    leader, follower = run_ranks("tests.support.learner_rank", "deserted", tmp_path)
    assert leader.returncode == 99
    assert follower.returncode == ServiceStopped.exit_code, follower.stderr
    assert "learner rank 1 lost its connection to the other ranks" in follower.stderr
