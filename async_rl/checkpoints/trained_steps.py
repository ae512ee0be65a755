"""Reads the journal trained.jsonl: the steps of each learner, and which of them the weights of a checkpoint contain.

learner/reporting/journal.py writes it and documents its rows. Independent of the buffer, so that it can verify the buffer's
state. An unreadable row is skipped and named in `damage`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from async_rl.durable.row_file import rows_of
from async_rl.types import UndoneGroup

FILE = "trained.jsonl"


class _Row(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    version: int
    timeline: str


class _Resumed(_Row):
    resumed_after: int
    fence: int | None = None


class _RolledBack(_Row):
    rolled_back_to: int


class TrainedGroup(BaseModel):
    """A group in the row of a step."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    id: str
    task: str
    oldest_version: int
    task_index: int | None = None
    """Index of its task in the run's stream; None in journals of older releases."""
    attempt: int = 1
    """The attempt of its ticket."""


class _Step(_Row):
    step: int
    groups: tuple[TrainedGroup, ...]


_ROW: TypeAdapter[_Resumed | _RolledBack | _Step] = TypeAdapter(
    Annotated[_Resumed | _RolledBack | _Step, Field(union_mode="left_to_right")]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class JournaledStep:
    number: int
    trained: int
    """Version of the weights that the groups trained."""
    version: int
    """Version of the resulting weights; equal to `trained` if the step was skipped."""
    groups: tuple[TrainedGroup, ...]


@dataclass(slots=True, kw_only=True)
class LearnerLife:
    """The rows of one learner process."""

    resumed_after: int
    """Step of the checkpoint it resumed from; 0 for none."""
    version: int
    """Version of the weights it started with."""
    timeline: str
    fence: int | None
    steps: list[JournaledStep] = field(default_factory=list[JournaledStep])
    newest: int
    """Highest version that it issued."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedSteps:
    """The whole journal; lives are ordered by their start."""

    lives: Sequence[LearnerLife]
    damage: Sequence[str]
    """One sentence per unreadable row."""

    def behind(self, timeline: str, step: int) -> list[JournaledStep] | None:
        """The steps contained in the weights of a timeline at `step`, in order; None if the timeline is not in this journal."""
        found: list[JournaledStep] = []
        for life in self.lives:
            found = [each for each in found if each.number <= life.resumed_after]
            if life.timeline == timeline:
                return [*found, *(each for each in life.steps if each.number <= step)]
            found += life.steps
        return None

    def undone(self, step: int) -> list[UndoneGroup]:
        """The groups whose training a resume from `step` would undo: trained by the latest learner after `step`, and not before
        as well.
        """
        steps = self.in_force()
        kept = {group.id for each in steps if each.number <= step for group in each.groups}
        return [
            UndoneGroup(group.id, group.task_index, group.attempt)
            for group in {group.id: group for each in steps if each.number > step for group in each.groups}.values()
            if group.task_index is not None and group.id not in kept
        ]

    def in_force(self) -> list[JournaledStep]:
        """The steps contained in the latest learner's last weights."""
        if not self.lives:
            return []
        last = self.lives[-1]
        steps = self.behind(last.timeline, last.steps[-1].number if last.steps else last.resumed_after)
        return steps if steps is not None else []


def read_trained(run_folder: Path, *, after: int = 0) -> TrainedSteps | None:
    """Read the journal; None if there is none. May be called while a learner writes: a partial last row is skipped.

    Steps up to `after` are left out.
    """
    path = run_folder / FILE
    if not path.exists():
        return None
    lives: dict[str, LearnerLife] = {}
    damage: list[str] = []
    for number, line in enumerate(rows_of(path), start=1):
        try:
            if line.strip():
                _enter(_ROW.validate_json(line), lives, after)
        except (ValidationError, LookupError):
            damage.append(f"row {number} of {FILE} cannot be read")
    return TrainedSteps(lives=list(lives.values()), damage=damage)


def first_timeline(run_folder: Path) -> str:
    """Return the timeline of a run's first learner, which no other run has; "" before its first row."""
    path = run_folder / FILE
    for line in rows_of(path) if path.exists() else ():
        with suppress(ValidationError):
            return _ROW.validate_json(line).timeline
    return ""


def _enter(row: _Resumed | _RolledBack | _Step, lives: dict[str, LearnerLife], after: int) -> None:
    """Add a row to its life, found by timeline: a learner that lost its fence may still write after its successor started."""
    if isinstance(row, _Resumed):
        lives[row.timeline] = LearnerLife(
            resumed_after=row.resumed_after, version=row.version, timeline=row.timeline, fence=row.fence, newest=row.version
        )
        return
    life = lives[row.timeline]
    if isinstance(row, _Step) and row.step > after:
        life.steps.append(JournaledStep(number=row.step, trained=life.newest, version=row.version, groups=row.groups))
    life.newest = row.version
