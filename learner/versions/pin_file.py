"""pinned.json in the run's folder: tells the next learner which weights an operator pinned."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from async_rl.durable.whole_file import write_whole


class PinRecord(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    step: int
    """Step of the pinned weights."""
    checkpoint: str = ""
    """Name of their checkpoint after a rollback; empty: only the learner had these weights."""


class PinFile:
    def __init__(self, run_folder: Path) -> None:
        self._path = run_folder / "pinned.json"

    def read(self) -> PinRecord | None:
        return PinRecord.model_validate_json(self._path.read_bytes()) if self._path.exists() else None

    def write(self, pin: PinRecord) -> None:
        write_whole(self._path, pin.model_dump_json())

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)
