"""What a run trained, told from its journal and its last checkpoint, and what must be true of it.

Nothing here asks the buffer: it is the second opinion.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from async_rl.checkpoints.manifest import candidates, read_manifest
from async_rl.config import Config
from learner.ranks.rank_group_thread import POSITION


@dataclass(frozen=True, kw_only=True)
class Group:
    id: str
    task_index: int
    age: int
    """Of its oldest token, when it was trained."""


@dataclass(frozen=True, kw_only=True)
class Step:
    number: int
    version: int
    groups: Sequence[Group]


@dataclass(frozen=True, kw_only=True)
class Life:
    """Of one learner process."""

    resumed_after: int
    version: int
    timeline: str
    fence: int
    lost: int
    """Groups that it has rolled again, because the checkpoint that contained them is gone."""
    steps: list[Step] = field(default_factory=list)


def lives(config: Config) -> list[Life]:
    """In the order in which they began. A learner that lost its fence may still write a row after its successor began."""
    path = config.run_folder / "trained.jsonl"
    found: dict[str, Life] = {}
    for line in path.read_text().splitlines(keepends=True) if path.exists() else []:
        if not line.endswith("\n"):  # it is being written
            continue
        row = json.loads(line)
        if "resumed_after" in row:
            found[row["timeline"]] = Life(**row)
        elif "rolled_back_to" not in row:
            life = found[row["timeline"]]
            life.steps.append(_step(row, life))
    return list(found.values())


def _step(row: dict[str, Any], life: Life) -> Step:
    trained = life.steps[-1].version if life.steps else life.version
    groups = [
        Group(id=group["id"], task_index=group["task_index"], age=trained - group["oldest_version"]) for group in row["groups"]
    ]
    return Step(number=row["step"], version=row["version"], groups=groups)


def last_step(config: Config) -> int:
    """The step that the learner alive trained last."""
    found = lives(config)
    return found[-1].steps[-1].number if found and found[-1].steps else 0


def surviving(found: Sequence[Life]) -> list[Step]:
    """The steps behind the weights at the end."""
    steps: list[Step] = []
    for life in found:
        steps = [step for step in steps if step.number <= life.resumed_after] + life.steps
    return steps


def check(config: Config, *, steps: int) -> None:
    """Every step up to this one once, every group at most once, no task lost, no version twice, nobody too old."""
    found = lives(config)
    trained = surviving(found)
    numbers = [step.number for step in trained]
    assert numbers == list(range(1, steps + 1)), f"steps are missing or repeated: {numbers}"
    sizes = {len(step.groups) for step in trained}
    assert sizes == {config.batch.groups_per_step}, f"steps trained {sizes} groups"
    groups = [group for step in trained for group in step.groups]
    assert len({group.id for group in groups}) == len(groups), "a group was trained twice"
    versions = [version for life in found for version in (life.version, *[step.version for step in life.steps])]
    assert all(earlier < later for earlier, later in pairwise(versions)), f"a version went back: {versions}"
    ages = {group.age for life in found for step in life.steps for group in step.groups}
    assert ages <= set(range(config.limits.age_bound + 1)), f"groups were trained at the ages {ages}"
    _check_tasks(config.run_folder, [group.task_index for group in groups])


def _check_tasks(run_folder: Path, trained: Sequence[int]) -> None:
    """Every task handed out is trained, or still on its way, and only one of these."""
    manifest = read_manifest(candidates(run_folder / "checkpoints")[0])
    position = POSITION.validate_python(manifest.extra["position"])
    under_way = [ticket.task_index for ticket in (*position.redo, *position.outstanding)]
    times = Counter([*trained, *under_way])
    wrong = {task: times[task] for task in range(position.next_task) if times[task] != 1}
    assert not wrong, f"tasks, and how many groups stand for each: {wrong}"
    assert times.total() == position.next_task


def ranks_of_newest(config: Config) -> int:
    """Data-parallel ranks that have written the newest checkpoint."""
    found = candidates(config.run_folder / "checkpoints")
    return read_manifest(found[0]).layout.data if found else 0
