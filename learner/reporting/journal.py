"""trained.jsonl: the groups that each step trained. `async-rl audit` checks with it that no group was trained twice or lost.

    {"resumed_after": 0, "version": 0, "timeline": "3d13b251", "fence": 1, "lost": 0}
    {"step": 1, "version": 1, "timeline": "3d13b251", "fence": 1,
     "groups": [{"id": "t000000000", "task": "counting/0/0", "environment": "counting", "task_index": 0, "attempt": 1,
                 "oldest_version": 0}, ...]}
    {"rolled_back_to": 1, "served_as": 8, "version": 9, "timeline": "3d13b251", "fence": 1}

As in metrics.jsonl, a row with `resumed_after` supersedes the earlier rows above that step, whose weights are gone. `lost` is
the number of their groups that Redis no longer had because the checkpoint that contained them is damaged or was moved: their
tasks are rolled out again, the other groups train again. A row is durable before its version can be seen and before
the checkpoint of its step, so no version that was used and no step that a resume keeps is ever missing here.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from itertools import islice
from pathlib import Path
from typing import Self

import structlog

from async_rl.durable.best_effort import explain_write_error
from async_rl.durable.row_file import RowFile, rows_backwards
from async_rl.errors import CheckpointError
from async_rl.supervision import working
from learner.prefetch import StepBatch
from learner.progress import Progress
from learner.versions.publish import PackedVersion

NAME = "trained.jsonl"
RETRY_S = 1.0
"""Seconds between two attempts to write to a disk that refuses."""
ROWS_READ = 8
"""Rows read from the end of a journal: versions only grow."""

log = structlog.get_logger(__name__)


class Journal:
    """The journal, appended to by one learner."""

    def __init__(self, run_folder: Path, *, fence: int, disk_wait_s: float, meanwhile: Callable[[], Awaitable[None]]) -> None:
        """A row that the disk refuses is retried for `disk_wait_s`; `meanwhile` is called between two attempts."""
        self._path, self._fence = run_folder / NAME, fence
        self._disk_wait_s, self._meanwhile = disk_wait_s, meanwhile
        self._file: RowFile | None = None

    @staticmethod
    def highest_version(run_folder: Path) -> int:
        """Return the highest version that may have been seen, -1 before the first. A restored Redis may not know it."""
        return max((json.loads(row)["version"] for row in islice(rows_backwards(run_folder / NAME), ROWS_READ)), default=-1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_problem: object) -> None:
        if self._file is not None:
            self._file.close()

    async def begin(self, start: Progress, *, lost: int = 0) -> None:
        """Record a start. `lost`: groups trained in steps that no checkpoint contains; their tasks are rolled out again."""
        await self._append({"resumed_after": start.step, **self._at(start), "lost": lost})

    async def add(self, progress: Progress, step_batch: StepBatch) -> None:
        """Record the groups of a step."""
        groups = [
            {
                "id": taken.group.id,
                "task": taken.group.task.key,
                "environment": taken.group.task.environment,
                "task_index": taken.task_index,
                "attempt": taken.attempt,
                "oldest_version": taken.group.oldest_version,
            }
            for taken in step_batch.groups
        ]
        await self._append({"step": progress.step, **self._at(progress), "groups": groups})

    async def add_rollback(self, served: PackedVersion, version: int) -> None:
        """Record a rollback. `version`: the version of the weights being trained from here on."""
        at = {"version": version, "timeline": served.timeline, "fence": self._fence}
        await self._append({"rolled_back_to": served.step, "served_as": served.version, **at})

    def _at(self, progress: Progress) -> dict[str, object]:
        return {"version": progress.version, "timeline": progress.timeline, "fence": self._fence}

    async def _append(self, row: Mapping[str, object]) -> None:
        """Return when the row is durable. Raises CheckpointError when the disk refused it for `disk_wait_s`."""
        data, since = json.dumps(row).encode(), time.monotonic()
        problem: OSError | None = None
        while True:
            try:
                await asyncio.to_thread(self._write, data)
            except OSError as error:
                waited_s = time.monotonic() - since
                if waited_s >= self._disk_wait_s:
                    raise CheckpointError(
                        f"the learner waited {waited_s:.0f} s to write {NAME}: {explain_write_error(error, self._path)}"
                    ) from error
                if problem is None:
                    log.warning(
                        f"the learner waits: {explain_write_error(error, self._path)}; {NAME} must be written before it "
                        "continues"
                    )
                problem = error
                await self._meanwhile()
                await asyncio.sleep(min(RETRY_S, self._disk_wait_s - waited_s))
            else:
                if problem is not None:
                    log.info(f"{NAME} is written again, training continues")
                return

    @working("the journal")
    def _write(self, row: bytes) -> None:
        if self._file is None:
            self._file = RowFile(self._path, sync=True)
        self._file.append(row)
