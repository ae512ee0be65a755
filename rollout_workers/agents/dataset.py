"""Tasks from a dataset: each row is a prompt and its answer, scored by a named function.

environments:
  - type: dataset
    args: {path: openai/gsm8k, subset: main, prompt: question, answer_after: "####", scoring: number, chat: true}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import ValidationError

from async_rl.config.hub.datasets import DatasetConfig
from async_rl.config.located_yaml import DEFAULT, Branch
from async_rl.config.problems import describe
from async_rl.datasets.columns import MissingColumn, Template, column
from async_rl.datasets.opening import open_rows, split_name
from async_rl.datasets.order import Epochs
from async_rl.datasets.rows import BadRow, Row
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

    reads_dataset: ClassVar[bool] = True
    """A run pins the commit of a dataset on the Hub that `path` names; so also in subclasses."""

    path: str
    """A .jsonl, .json or .parquet file, a folder of such files or one that `datasets` saved, or a dataset on the Hugging Face
    Hub."""
    subset: str = ""
    """Which subset (configuration) of a dataset with several."""
    split: str = "train"
    """Which split of a dataset with several, or a part of it: train[:95%]."""
    revision: str = ""
    """Branch, tag or commit of a dataset on the Hub."""
    filters: Sequence[Mapping[str, Any]] = ()
    """Use only the rows that meet all of these conditions: {column: level, one_of: [1, 2]}."""
    prompt: str = "prompt"
    """The column of prompts: texts, or lists of {role, content}. Columns may be dotted paths, such as extra_info.question."""
    template: str = ""
    """A Jinja template over the columns, which makes the prompt instead of a column."""
    answer: str = "answer"
    """The column of answers; empty if the scoring needs none."""
    answer_after: str = ""
    """The answer is what follows the last occurrence of this text in its column, such as ####."""
    columns: Sequence[str] = ()
    """Further columns that the scoring reads from `task.data`."""
    chat: bool = False
    """Wrap text prompts in a user message for the chat template."""
    system: str = ""
    """A system message before the prompt; implies `chat`."""
    scoring: str = "exact_match"
    """exact_match, contains, number, math, the http://... of a served reward model, or your own function (task, response):
    `module:function` or `file.py:function`.
    """
    shuffle: bool = True
    curriculum: str = ""
    """A function that returns stages: `module:function` or `file.py:function`."""

    def __post_init__(self) -> None:
        self._rows = open_rows(self._config())
        self._score = find_scoring(self.scoring)
        self._template = Template(self.template) if self.template else None
        self._order = self._ordered()
        try:
            for path in ([] if self.template else [self.prompt]) + ([self.answer] if self.answer else []) + [*self.columns]:
                column(self._rows[0], path)
        except MissingColumn as error:
            raise ConfigError(f"dataset {self.path} {error}") from error

    def _config(self) -> DatasetConfig:
        given = {name: getattr(self, name) for name in DatasetConfig.model_fields}
        try:
            return DatasetConfig.model_validate(given)
        except ValidationError as error:
            raise ConfigError(
                f"dataset {self.path}: {describe(error, DatasetConfig, Branch(children={}, origin=DEFAULT))}"
            ) from error

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
            return Task(
                key=f"{self.name}/{split_name(self.split)}/{self._rows.number(number)}",
                environment=self.name,
                prompt=self.prompt_of(row),
                answer=self.answer_of(row),
                data={path: value if isinstance(value := column(row, path), Scalar) else str(value) for path in self.columns},
            )
        except ValueError as error:
            raise BadRow(f"{self._rows.place(number)}: {error}") from error

    def prompt_of(self, row: Row) -> str | tuple[Message, ...]:
        asked = self._template(row) if self._template is not None else column(row, self.prompt)
        return PromptFormat(chat=self.chat, system=self.system).prompt(asked)

    def answer_of(self, row: Row) -> str:
        answer = str(column(row, self.answer)) if self.answer else ""
        if not self.answer_after:
            return answer
        _, found, after = answer.rpartition(self.answer_after)
        if not found:
            raise ValueError(f"has no {self.answer_after!r} in its answer {answer!r:.80}")
        return after.strip()

    def reward(self, task: Task, response: str) -> RewardValue:
        return self._score(task, response)
