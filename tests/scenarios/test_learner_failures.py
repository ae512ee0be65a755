"""Ranks fail together: none is left waiting for a peer that gave up, and older checkpoints stay."""

from pathlib import Path

from async_rl.checkpoint_files import candidates, read_manifest
from async_rl.errors import CheckpointError, ServiceStopped
from learner import checkpoint
from tests.scenarios.learner_rank import run_ranks


def test_a_full_disk_on_one_rank_ends_both_and_spares_the_older_checkpoint(tmp_path: Path) -> None:
    leader, follower = run_ranks("full_disk", tmp_path)
    assert [leader.returncode, follower.returncode] == [CheckpointError.exit_code] * 2, leader.stderr + follower.stderr
    assert "another rank failed; older checkpoints are untouched" in leader.stderr
    assert "could not write its part of a checkpoint" in follower.stderr
    [survivor] = candidates(tmp_path / "checkpoints")
    manifest = read_manifest(survivor)
    assert manifest.step == 0
    assert all(checkpoint.read_rank(survivor, manifest, rank) for rank in range(2))


def test_a_rank_that_rank_0_deserted_ends_by_itself(tmp_path: Path) -> None:
    leader, follower = run_ranks("deserted", tmp_path)
    assert leader.returncode == 99
    assert follower.returncode == ServiceStopped.exit_code, follower.stderr
    assert "learner rank 1 hears no more of rank 0" in follower.stderr
