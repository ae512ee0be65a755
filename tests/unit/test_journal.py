"""trained.jsonl: above which number a learner goes on, when Redis no longer knows."""

from __future__ import annotations

from pathlib import Path

from learner.loop import Progress
from learner.reporting.journal import Journal


def test_versions_go_on_above_the_highest_that_anybody_may_have_seen(tmp_path: Path):
    assert Journal.highest_version(tmp_path) == -1
    for version in (0, 7, 12):
        with Journal(tmp_path, Progress(step=0, version=version, timeline="t")):
            pass
    assert Journal.highest_version(tmp_path) == 12
    with (tmp_path / "trained.jsonl").open("a") as file:
        file.write('{"step": 3, "version": 99, "gro')  # a crash in mid-row: the version was not visible yet
    assert Journal.highest_version(tmp_path) == 12
