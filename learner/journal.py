"""trained.jsonl: which groups each step trained. With it anybody can check that no group was trained twice, or lost.

    {"resumed_after": 0, "version": 0, "timeline": "3d13b251"}
    {"step": 1, "version": 1, "timeline": "3d13b251",
     "groups": [{"id": "t000000000", "task": "counting/0/0", "oldest_version": 0}, ...]}

As in metrics.jsonl, `resumed_after` supersedes every row above that step before it. A row is written before the checkpoint
that contains its step, so a step that a resume keeps is never missing here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from learner.loop import Progress, Stepped


class Journal:
    def __init__(self, run_folder: Path, start: Progress) -> None:
        run_folder.mkdir(parents=True, exist_ok=True)
        path = run_folder / "trained.jsonl"
        was_cut = path.exists() and path.read_bytes()[-1:] not in (b"", b"\n")
        self._file = path.open("ab", buffering=0)  # what is written survives the process
        if was_cut:
            self._file.write(b"\n")
        self._append({"resumed_after": start.step, "version": start.version, "timeline": start.timeline})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_problem: object) -> None:
        self._file.close()

    def add(self, stepped: Stepped) -> None:
        progress = stepped.progress
        groups = [
            {"id": group.id, "task": group.task.key, "oldest_version": group.oldest_version}
            for group in (taken.group for taken in stepped.meal.groups)
        ]
        self._append({"step": progress.step, "version": progress.version, "timeline": progress.timeline, "groups": groups})

    def _append(self, row: Mapping[str, object]) -> None:
        self._file.write(json.dumps(row).encode() + b"\n")
