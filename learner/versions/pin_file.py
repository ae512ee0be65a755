"""pinned.json in the run's folder: what a person held fast, for the learner after this one."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from async_rl.durable.whole_file import write_whole


class PinRecord(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    step: int
    """Of the weights that are served."""
    checkpoint: str = ""
    """Where they lie, if they were rolled back to; else only the learner had them."""


class PinFile:
    def __init__(self, run_folder: Path) -> None:
        self._path = run_folder / "pinned.json"

    def read(self) -> PinRecord | None:
        return PinRecord.model_validate_json(self._path.read_bytes()) if self._path.exists() else None

    def write(self, pin: PinRecord) -> None:
        write_whole(self._path, pin.model_dump_json())

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)
