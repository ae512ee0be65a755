"""fences.jsonl: every fence that a learner of this run used, recorded before its first use.

    {"fence": 7, "owner": "gpu-3:4711"}

Redis issues fences, but a Redis that was emptied or restored starts again, and could issue a fence that a paused learner
still holds. So the learner asks for a fence above all that the run's folder knows, and no two learners claim the same one.
"""

from __future__ import annotations

import fcntl
import json
from contextlib import closing
from itertools import islice
from pathlib import Path

from async_rl.checkpoints.manifest import candidates, life_of_draft, place_of
from async_rl.durable.best_effort import explain_write_error
from async_rl.durable.row_file import RowFile, rows_backwards, rows_of
from async_rl.errors import CheckpointError, FenceLost

ROWS_READ = 8
"""Rows read from the end of the journal: fences only grow."""


class Fences:
    def __init__(self, run_folder: Path) -> None:
        self._folder, self._path = run_folder, run_folder / "fences.jsonl"

    def highest(self) -> int:
        """Return the highest fence found in claims, checkpoints and the journal; 0 before the first learner."""
        saves = self._folder / "checkpoints"
        known = [self._claimed()]
        known += [json.loads(row).get("fence", 0) for row in islice(rows_backwards(self._folder / "trained.jsonl"), ROWS_READ)]
        known += [place_of(checkpoint)[0] for checkpoint in candidates(saves)]
        known += [life_of_draft(draft) for draft in saves.glob(".step-*.partial")]
        return max(known)

    def claim(self, fence: int, owner: str) -> None:
        """Record the fence durably. Raises FenceLost if it or a higher one was claimed, CheckpointError on disk errors."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with (self._folder / "fences.lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # held for one write, so waiting is short
                if (highest := self._claimed()) >= fence:
                    raise FenceLost(
                        f"learner {highest} of this run began while this one was paused; Redis issued fence {fence} again, "
                        "because it lost the later ones"
                    )
                with closing(RowFile(self._path, sync=True)) as file:
                    file.append(json.dumps({"fence": fence, "owner": owner}).encode())
        except OSError as error:
            raise CheckpointError(f"the learner cannot record its fence: {explain_write_error(error, self._path)}") from error

    def _claimed(self) -> int:
        return max((json.loads(row)["fence"] for row in rows_of(self._path)), default=0)
