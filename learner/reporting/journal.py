"""trained.jsonl: which groups each step trained. With it anybody can check that no group was trained twice, or lost.

    {"resumed_after": 0, "version": 0, "timeline": "3d13b251"}
    {"step": 1, "version": 1, "timeline": "3d13b251",
     "groups": [{"id": "t000000000", "task": "counting/0/0", "oldest_version": 0}, ...]}
    {"rolled_back_to": 1, "served_as": 8, "version": 9, "timeline": "3d13b251"}

As in metrics.jsonl, `resumed_after` supersedes every row above that step before it. A row is written before its version can be
seen and before the checkpoint that contains its step, so neither a version that was used nor a step that a resume keeps is
ever missing here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from async_rl.types import VersionRecord
from learner.feed import Meal
from learner.progress import Progress

TAIL_BYTES = 4 * 2**20
ROWS_READ = 8
"""Of the end of a journal: versions only grow."""


class Journal:
    def __init__(self, run_folder: Path, start: Progress) -> None:
        run_folder.mkdir(parents=True, exist_ok=True)
        path = run_folder / "trained.jsonl"
        was_cut = path.exists() and path.read_bytes()[-1:] not in (b"", b"\n")
        self._file = path.open("ab", buffering=0)  # what is written survives the process
        if was_cut:
            self._file.write(b"\n")
        self._append({"resumed_after": start.step, "version": start.version, "timeline": start.timeline})

    @staticmethod
    def highest_version(run_folder: Path) -> int:
        """That anybody may have seen; -1 before the first. A Redis that was emptied or set back does not know it any more."""
        path = run_folder / "trained.jsonl"
        if not path.exists():
            return -1
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            lines = file.read().split(b"\n")[-ROWS_READ:]
        return max((json.loads(line)["version"] for line in lines if _is_whole(line)), default=-1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_problem: object) -> None:
        self._file.close()

    def add(self, progress: Progress, meal: Meal) -> None:
        groups = [
            {"id": group.id, "task": group.task.key, "oldest_version": group.oldest_version}
            for group in (taken.group for taken in meal.groups)
        ]
        self._append({"step": progress.step, "version": progress.version, "timeline": progress.timeline, "groups": groups})

    def add_rollback(self, served: VersionRecord, version: int) -> None:
        """`version` is the number under which what is trained goes on."""
        row = {"rolled_back_to": served.step, "served_as": served.version, "version": version, "timeline": served.timeline}
        self._append(row)

    def _append(self, row: Mapping[str, object]) -> None:
        self._file.write(json.dumps(row).encode() + b"\n")


def _is_whole(line: bytes) -> bool:
    """Not empty, and not the rest of a row that a crash cut."""
    return line.startswith(b"{") and line.endswith(b"}")
