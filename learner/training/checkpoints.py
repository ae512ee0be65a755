"""Checkpoints of `async-rl train`: weights, optimizer, and the position in the table."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path

from async_rl.checkpoints.manifest import candidates
from async_rl.errors import CheckpointError
from async_rl.supervision import working
from learner.checkpoints.checkpointer import Checkpointer
from learner.checkpoints.writing import Written


@dataclass(frozen=True, slots=True, kw_only=True)
class TableProgress:
    step: int
    place: int
    """Rows read so far; it keeps counting over epochs."""


class TrainingCheckpoints:
    """One rank's checkpoints. Collective: every rank makes the same calls."""

    def __init__(self, checkpointer: Checkpointer, run_folder: Path, *, keep: int) -> None:
        self._checkpointer, self._folder, self._keep = checkpointer, run_folder / "checkpoints", keep
        self._under_way: Future[Written] | None = None

    @working("the newest checkpoint")
    def load(self) -> TableProgress:
        """Restore the newest checkpoint and return its position, or the beginning."""
        extra = self._checkpointer.load(self._folder, [path.name for path in candidates(self._folder)])
        if not extra:  # no checkpoint, or an imported model, which has no position
            return TableProgress(step=0, place=0)
        if "place" not in extra:
            raise CheckpointError(f"{self._folder} belongs to a run of another kind; choose another run.name")
        return TableProgress(step=extra["step"], place=extra["place"])

    @working("a copy for a checkpoint")
    def begin(self, progress: TableProgress) -> None:
        """Begin a checkpoint; training may continue on return. Raises CheckpointError if the previous one failed."""
        self.finish()
        self._under_way = self._checkpointer.begin(self._folder, step=progress.step, extra=asdict(progress), keep=self._keep)

    def finish(self) -> None:
        """Wait until the last checkpoint is durable. Raises CheckpointError if it failed."""
        if self._under_way is not None:
            with working("a checkpoint"):
                self._under_way.result()
            self._under_way = None
