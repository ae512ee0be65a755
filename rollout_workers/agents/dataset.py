"""Tasks from a table: each row is a prompt and its answer, scored by a named function.

environments:
  - type: dataset
    args: {path: problems.jsonl, prompt: question, answer: answer, scoring: exact_match}
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from async_rl.datasets.order import Epochs
from async_rl.datasets.rows import BadRow, Row, open_rows
from async_rl.errors import ConfigError
from async_rl.tokenization.rendering import PromptFormat
from async_rl.types import Message, Scalar, Task
from rollout_workers.agents.environment import RewardValue
from rollout_workers.agents.reward_only import RewardOnlyAgent
from rollout_workers.datasets.curriculum import CurriculumOrder, RowOrder
from rollout_workers.datasets.scoring import find_scoring
from rollout_workers.registry import load_attribute


@dataclass(kw_only=True)
class DatasetAgent(RewardOnlyAgent):
    """Pose the rows epoch after epoch, each epoch in its own order. Subclass it to read rows differently."""

    path: str
    """A .jsonl or .parquet file, a folder that `datasets` saved, or the name of a dataset on the Hugging Face hub."""
    split: str = "train"
    """Which split of a dataset with several."""
    prompt: str = "prompt"
    """The column of prompts: texts, or lists of {role, content}."""
    answer: str = "answer"
    """The column of answers; empty if the scoring needs none."""
    columns: Sequence[str] = ()
    """Further columns that the scoring reads from `task.data`."""
    chat: bool = False
    """Wrap text prompts in a user message for the chat template."""
    system: str = ""
    """A system message before the prompt; implies `chat`."""
    scoring: str = "exact_match"
    """exact_match, contains, math, the http://... of a served reward model, or your own function (task, response):
    `module:function` or `file.py:function`.
    """
    shuffle: bool = True
    curriculum: str = ""
    """A function that returns stages: `module:function` or `file.py:function`."""

    def __post_init__(self) -> None:
        self._rows = open_rows(self.path, self.split)
        self._score = find_scoring(self.scoring)
        self._order = self._ordered()
        first = self._rows[0]
        wanted = [self.prompt, *([self.answer] if self.answer else []), *self.columns]
        if missing := [column for column in wanted if column not in first]:
            raise ConfigError(f"dataset {self.path} has no column {missing[0]!r}; it has {', '.join(first)}")

    def _ordered(self) -> RowOrder:
        seed = f"{self.seed}/{self.name}"
        if not self.curriculum:
            return Epochs(len(self._rows), seed=seed, is_shuffled=self.shuffle).row
        stages = load_attribute(self.curriculum)()
        return CurriculumOrder(self._rows, stages, seed=seed, is_shuffled=self.shuffle).row

    @property
    def num_tasks(self) -> int | None:
        """The number of rows; None with a curriculum, whose stages choose rows themselves."""
        return None if self.curriculum else len(self._rows)

    def task(self, index: int) -> Task:
        number = self._order(index)
        row = self._rows[number]
        try:
            prompt = self.prompt_of(row)
        except ValueError as error:
            raise BadRow(f"{self._rows.place(number)}: {error}") from error
        return Task(
            key=f"{self.name}/{self.split}/{number}",
            environment=self.name,
            prompt=prompt,
            answer=self.answer_of(row),
            data={column: value if isinstance(value := row[column], Scalar) else str(value) for column in self.columns},
        )

    def prompt_of(self, row: Row) -> str | tuple[Message, ...]:
        return PromptFormat(chat=self.chat, system=self.system).prompt(row[self.prompt])

    def answer_of(self, row: Row) -> str:
        return str(row[self.answer]) if self.answer else ""

    def reward(self, task: Task, response: str) -> RewardValue:
        return self._score(task, response)
