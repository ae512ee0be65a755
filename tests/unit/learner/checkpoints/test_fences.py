"""No two learners of a run use the same fence, whatever Redis, the clock or a person with `mv` did in between."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from async_rl.errors import CheckpointError, FenceLost
from learner.checkpoints.fences import Fences
from learner.progress import Progress
from learner.reporting.journal import Journal


def test_the_first_learner_of_a_run_begins_with_nothing(tmp_path: Path):
    assert Fences(tmp_path / "not there yet").highest() == 0


def claims(folder: Path, fence: int) -> None:
    Fences(folder).claim(fence, "host:1")


def checkpoint(folder: Path, fence: int) -> None:
    (folder / "checkpoints" / f"step-00000003-by-{fence}").mkdir(parents=True)


def draft(folder: Path, fence: int) -> None:
    (folder / "checkpoints" / f".step-00000003-by-{fence}.partial").mkdir(parents=True)


async def journal(folder: Path, fence: int) -> None:
    async def nothing() -> None:
        pass

    with Journal(folder, fence=fence, disk_wait_s=0, meanwhile=nothing) as written:
        await written.begin(Progress(step=0, version=0, timeline="t"))


@pytest.mark.parametrize("trace", [claims, checkpoint, draft, journal])
async def test_whatever_is_left_of_a_learner_tells_its_fence(tmp_path: Path, trace):
    for fence in (1_763_722_547_000, 12):  # the clock gave the first one; nothing is left but the traces
        left = trace(tmp_path / str(fence), fence)
        if left is not None:
            await left
        assert Fences(tmp_path / str(fence)).highest() == fence


def test_a_learner_that_slept_cannot_claim_what_its_successor_has(tmp_path: Path):
    """Both were given fence 5, because the server was emptied in between."""
    claims(tmp_path, 4)
    claims(tmp_path, 5)
    with pytest.raises(FenceLost, match="learner 5 of this run began while this one was paused"):
        claims(tmp_path, 5)
    with pytest.raises(FenceLost):
        claims(tmp_path, 3)
    assert Fences(tmp_path).highest() == 5


def test_of_several_that_claim_at_once_one_succeeds(tmp_path: Path):
    at_once = threading.Barrier(8)

    def claim(_number: int) -> bool:
        at_once.wait()
        try:
            claims(tmp_path, 7)
        except FenceLost:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(claim, range(8))) == 1


def test_a_learner_that_cannot_write_its_fence_down_does_not_begin(tmp_path: Path):
    (tmp_path / "fences.jsonl").mkdir()
    with pytest.raises(CheckpointError, match="the learner cannot record its fence"):
        claims(tmp_path, 1)
