"""Reading trained.jsonl: which steps each learner trained, and which of them the weights of a checkpoint have seen.

learner/reporting/journal.py writes it and says what stands in its rows. Nothing here asks the buffer: the journal is the
second opinion. A row that cannot be read is passed over and named in `damage`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

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
    """A group as its step trained it."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    id: str
    task: str
    oldest_version: int
    task_index: int | None = None
    """Its task's place in the run's stream; None in journals of older releases."""
    attempt: int = 1
    """Of its ticket."""


class _Step(_Row):
    step: int
    groups: tuple[TrainedGroup, ...]


_ROW: TypeAdapter[_Resumed | _RolledBack | _Step] = TypeAdapter(
    Annotated[_Resumed | _RolledBack | _Step, Field(union_mode="left_to_right")]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedStep:
    number: int
    trained: int
    """The version of the weights that the groups trained."""
    version: int
    """Of the weights that came out; the same as `trained` where the step was skipped."""
    groups: tuple[TrainedGroup, ...]


@dataclass(slots=True, kw_only=True)
class LearnerLife:
    """What one learner process wrote."""

    resumed_after: int
    """The step of the checkpoint that it began with; 0 for none."""
    version: int
    """Of the weights that it began with."""
    timeline: str
    fence: int | None
    steps: list[TrainedStep] = field(default_factory=list[TrainedStep])
    newest: int
    """The highest version that it issued."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedSteps:
    """The whole journal. Lives stand in the order in which they began."""

    lives: Sequence[LearnerLife]
    damage: Sequence[str]
    """One sentence per row that cannot be read."""

    def behind(self, timeline: str, step: int) -> list[TrainedStep] | None:
        """The steps that the weights of a timeline have seen at `step`, in order; None for a timeline of another journal."""
        found: list[TrainedStep] = []
        for life in self.lives:
            found = [each for each in found if each.number <= life.resumed_after]
            if life.timeline == timeline:
                return [*found, *(each for each in life.steps if each.number <= step)]
            found += life.steps
        return None

    def undone(self, step: int) -> list[UndoneGroup]:
        """The groups that the latest learner's weights had seen, and its weights of `step` had not: a resume from there undoes
        their training. Those that trained before, too, are not among them.
        """
        steps = self.in_force()
        kept = {group.id for each in steps if each.number <= step for group in each.groups}
        return [
            UndoneGroup(group.id, group.task_index, group.attempt)
            for group in {group.id: group for each in steps if each.number > step for group in each.groups}.values()
            if group.task_index is not None and group.id not in kept
        ]

    def in_force(self) -> list[TrainedStep]:
        """The steps behind the weights that the latest learner held last."""
        if not self.lives:
            return []
        last = self.lives[-1]
        steps = self.behind(last.timeline, last.steps[-1].number if last.steps else last.resumed_after)
        return steps if steps is not None else []


def read_trained(run_folder: Path) -> TrainedSteps | None:
    """None where no learner has begun. May be called while a learner writes: a last row without an end is not there yet."""
    path = run_folder / FILE
    if not path.exists():
        return None
    lives: dict[str, LearnerLife] = {}
    damage: list[str] = []
    for number, line in _lines(path):
        try:
            row = _ROW.validate_json(line)
            _enter(row, lives)
        except (ValidationError, LookupError):
            damage.append(f"row {number} of {FILE} cannot be read")
    return TrainedSteps(lives=list(lives.values()), damage=damage)


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.endswith(b"\n") and line.strip():
                yield number, line


def _enter(row: _Resumed | _RolledBack | _Step, lives: dict[str, LearnerLife]) -> None:
    """A learner that lost its fence may still write a row after its successor began, so rows go by their timeline."""
    if isinstance(row, _Resumed):
        lives[row.timeline] = LearnerLife(
            resumed_after=row.resumed_after, version=row.version, timeline=row.timeline, fence=row.fence, newest=row.version
        )
        return
    life = lives[row.timeline]
    if isinstance(row, _Step):
        life.steps.append(TrainedStep(number=row.step, trained=life.newest, version=row.version, groups=row.groups))
    life.newest = row.version
