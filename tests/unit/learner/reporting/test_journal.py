"""trained.jsonl: whole rows, whatever the disk does, and above which number a learner goes on when Redis no longer knows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from async_rl.checkpoints.trained_steps import read_trained
from async_rl.durable import failpoints
from async_rl.errors import CheckpointError
from learner.progress import Progress
from learner.reporting.journal import Journal


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    failpoints.arm("")


class Meanwhile:
    """Counts how often the journal waited."""

    def __init__(self) -> None:
        self.times = 0

    async def __call__(self) -> None:
        self.times += 1


def journal(folder: Path, *, wait_s: float = 0, meanwhile: Meanwhile | None = None) -> Journal:
    return Journal(folder, fence=3, disk_wait_s=wait_s, meanwhile=meanwhile if meanwhile is not None else Meanwhile())


def progress(version: int) -> Progress:
    return Progress(step=0, version=version, timeline="t")


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "trained.jsonl").read_text().splitlines()]


async def test_versions_continue_above_the_highest_that_may_have_been_seen(tmp_path: Path):
    assert Journal.highest_version(tmp_path) == -1
    for version in (0, 7, 12):
        with journal(tmp_path) as written:
            await written.begin(progress(version))
    assert Journal.highest_version(tmp_path) == 12
    with (tmp_path / "trained.jsonl").open("a") as file:
        file.write('{"step": 3, "version": 99, "gro')  # a crash in mid-row: the version was not visible yet
    assert Journal.highest_version(tmp_path) == 12
    with journal(tmp_path) as written:
        await written.begin(progress(13))
    assert [row["version"] for row in rows(tmp_path)] == [0, 7, 12, 13], "the torn row is cut off"


async def test_the_learner_waits_for_a_disk_and_continues(tmp_path: Path):
    failpoints.arm("append.trained.jsonl:2-3=ENOSPC")
    meanwhile = Meanwhile()
    with journal(tmp_path, wait_s=60, meanwhile=meanwhile) as written, structlog.testing.capture_logs() as said:
        await written.begin(progress(1))
        await written.begin(progress(2))
    assert [row["version"] for row in rows(tmp_path)] == [1, 2]
    assert meanwhile.times == 2, "other ranks hear that all is well"
    assert [line["log_level"] for line in said] == ["warning", "info"]
    assert "the learner waits: the disk of" in said[0]["event"]


@pytest.mark.parametrize(("error", "reason"), [("ENOSPC", "is full"), ("EIO", "cannot be written")])
async def test_a_disk_that_stays_full_ends_the_run_aloud(tmp_path: Path, error: str, reason: str):
    failpoints.arm(f"append.trained.jsonl:2-99={error}")
    with journal(tmp_path) as written:
        await written.begin(progress(1))
        with pytest.raises(CheckpointError, match=rf"waited 0 s to write trained.jsonl: .*{reason}"):
            await written.begin(progress(2))
    assert [row["version"] for row in rows(tmp_path)] == [1]


def test_the_journal_tells_what_a_resume_undoes(tmp_path: Path):
    """Life b resumed from step 2 of life a; now the newest checkpoint that is left is of step 1."""

    def step(number: int, timeline: str, *groups: str) -> dict[str, Any]:
        described = [
            {"id": each, "task": each, "oldest_version": 0, "task_index": int(each[1:]), "attempt": 1} for each in groups
        ]
        return {"step": number, "version": number, "timeline": timeline, "groups": described}

    content = [
        {"resumed_after": 0, "version": 0, "timeline": "a"},
        step(1, "a", "t0", "t1"),
        step(2, "a", "t2", "t0"),  # a group may train several steps
        step(3, "a", "t3"),
        {"resumed_after": 2, "version": 4, "timeline": "b"},
        {"rolled_back_to": 1, "served_as": 5, "version": 6, "timeline": "b"},
        step(3, "b", "t4", "t2"),
    ]
    (tmp_path / "trained.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    found = read_trained(tmp_path)
    assert found is not None
    undone = {step: [group.id for group in found.undone(step)] for step in (0, 1, 2, 3)}
    assert undone == {0: ["t0", "t1", "t2", "t4"], 1: ["t2", "t4"], 2: ["t4"], 3: []}
    for step in (0, 3):  # the others follow steps whose groups were trained again
        later = read_trained(tmp_path, after=step)
        assert later is not None
        assert later.undone(step) == found.undone(step)
