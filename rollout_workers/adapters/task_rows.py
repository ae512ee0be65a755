"""Tasks from what people have at hand: a list of prompts, pairs or dictionaries, a dataset, or a function of the index."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from async_rl.errors import ConfigError
from async_rl.types import Message, Scalar, Task
from rollout_workers.agents.task_stream import TaskStream

Row = str | tuple[str, str] | Mapping[str, Any]
"""A prompt, a prompt and its answer, or columns: `prompt` (a text, or messages with `role` and `content`), `answer`, others."""
Rows = Sequence[Row] | Callable[[int], Row]
"""Rows come again and again, in their order. A function must be pure: the same index, the same row."""


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
    """Poses rows. Columns that a task can hold are its `data`; `self.columns(task)` gives all of them."""

    rows: Rows

    def __post_init__(self) -> None:
        if not callable(self.rows) and not len(self.rows):
            raise ConfigError(f"environment {self.name!r} has no tasks: its list is empty")

    @property
    def num_tasks(self) -> int | None:
        return None if callable(self.rows) else len(self.rows)

    def task(self, index: int) -> Task:
        index = index % self.num_tasks if self.num_tasks is not None else index  # a row keeps its key when it comes again
        columns = columns_of(self.rows, index)
        prompt, answer = _prompt_of(columns.pop("prompt", None)), columns.pop("answer", "")
        data: dict[str, Scalar] = {name: value for name, value in columns.items() if isinstance(value, Scalar)}
        return self.new_task(index, prompt, answer=str(answer), **{**data, ROW: index})

    def columns(self, task: Task) -> dict[str, Any]:
        return columns_of(self.rows, int(task.data[ROW]))


ROW = "row_index"
"""Where a task remembers its row: its number in a list, its index where a function makes rows."""


def _prompt_of(given: object) -> str | tuple[Message, ...]:
    match given:
        case str():
            return given
        case [*messages] if all(isinstance(message, Mapping) for message in messages):
            return tuple(Message(role=str(message["role"]), content=str(message["content"])) for message in messages)
        case _:
            raise ValueError(f"a row's prompt must be a text or a list of messages, got {given!r:.100}")
