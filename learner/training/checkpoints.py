"""The checkpoints of a training: weights, optimizer, and the position in the table."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path

from async_rl.checkpoints.manifest import candidates
from async_rl.errors import CheckpointError
from learner.checkpoints.checkpointer import Checkpointer
from learner.checkpoints.writing import Written


@dataclass(frozen=True, slots=True, kw_only=True)
class TableProgress:
    step: int
    place: int
    """In the table: epochs follow each other."""


class TrainingCheckpoints:
    """One rank's. Every rank calls the same."""

    def __init__(self, checkpointer: Checkpointer, run_folder: Path, *, keep: int) -> None:
        self._checkpointer, self._folder, self._keep = checkpointer, run_folder / "checkpoints", keep
        self._under_way: Future[Written] | None = None

    def load(self) -> TableProgress:
        """Where the newest checkpoint stands, or the beginning."""
        extra = self._checkpointer.load(self._folder, [path.name for path in candidates(self._folder)])
        if not extra:  # there is none, or it is a model that was imported, which stands nowhere
            return TableProgress(step=0, place=0)
        if "place" not in extra:
            raise CheckpointError(f"{self._folder} belongs to a run of another kind; choose another run.name")
        return TableProgress(step=extra["step"], place=extra["place"])

    def begin(self, progress: TableProgress) -> None:
        """Training may go on when this returns. Raises CheckpointError for the one before, if that failed."""
        self.finish()
        self._under_way = self._checkpointer.begin(self._folder, step=progress.step, extra=asdict(progress), keep=self._keep)

    def finish(self) -> None:
        """Returns when the last one is durable."""
        if self._under_way is not None:
            self._under_way.result()
            self._under_way = None
