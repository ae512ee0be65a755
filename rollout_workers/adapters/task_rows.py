"""Tasks from rows: a list of prompts, pairs or dictionaries, a dataset, or a function of the index."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from async_rl.errors import ConfigError
from async_rl.types import Message, Scalar, Task
from rollout_workers.agents.task_stream import TaskStream
from rollout_workers.episodes.rewards import Score

Row = str | tuple[str, str] | Mapping[str, Any]
"""A prompt, a prompt and its answer, or columns: `prompt` (a text, or messages with `role` and `content`), `answer`, others."""
Rows = Sequence[Row] | Callable[[int], Row]
"""A list repeats in its order. A function must be pure: the same index, the same row."""
RewardFunction = Callable[[Task, Any], float | Score | Awaitable[float | Score]]
"""Scores a task and what its agent returned."""


def columns_of(rows: Rows, index: int) -> dict[str, Any]:
    row = rows(index) if callable(rows) else rows[index]
    if isinstance(row, str):
        return {"prompt": row}
    if isinstance(row, Mapping):
        return dict(row)
    prompt, answer = row
    return {"prompt": prompt, "answer": answer}


@dataclass(kw_only=True)
class RowTasks(TaskStream):
    """Tasks from rows. Scalar columns are the task's `data`; `self.columns(task)` returns all of them."""

    rows: Rows

    def __post_init__(self) -> None:
        if not callable(self.rows) and not len(self.rows):
            raise ConfigError(f"environment {self.name!r} has no tasks: its list is empty")

    @property
    def num_tasks(self) -> int | None:
        return None if callable(self.rows) else len(self.rows)

    def task(self, index: int) -> Task:
        index = index % self.num_tasks if self.num_tasks is not None else index  # a repeated row keeps its key
        columns = columns_of(self.rows, index)
        prompt, answer = _prompt_of(columns.pop("prompt", None)), columns.pop("answer", "")
        data: dict[str, Scalar] = {name: value for name, value in columns.items() if isinstance(value, Scalar)}
        return self.new_task(index, prompt, answer=str(answer), **{**data, ROW: index})

    def columns(self, task: Task) -> dict[str, Any]:
        return columns_of(self.rows, int(task.data[ROW]))


ROW = "row_index"
"""The key of `task.data` that holds the row: its number in a list, or the index passed to the function."""


def _prompt_of(given: object) -> str | tuple[Message, ...]:
    match given:
        case str():
            return given
        case [*messages] if all(isinstance(message, Mapping) for message in messages):
            return tuple(Message(role=str(message["role"]), content=str(message["content"])) for message in messages)
        case _:
            raise ValueError(f"a row's prompt must be a text or a list of messages, got {given!r:.100}")
