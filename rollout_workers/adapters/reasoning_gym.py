"""Tasks of reasoning-gym: over a hundred puzzle generators, each with its own verifier."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from async_rl.errors import ConfigError
from async_rl.types import Message, Task
from rollout_workers.adapters.import_optional import import_optional
from rollout_workers.agents import RewardOnlyAgent


@dataclass(kw_only=True)
class ReasoningGym(RewardOnlyAgent):
    dataset: str
    """Name of the dataset in reasoning-gym: `chain_sum`, `countdown`, ..."""
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Fields of the dataset's own configuration, such as min_terms."""
    size: int = 500
    """Number of different puzzles; they repeat after the last. Some datasets are slow, or fail, with large sizes."""
    instructions: str = ""
    """Text before each question, such as how to write the answer."""
    answer_after: str = ""
    """Score only what follows the last occurrence of this text; without it in the answer the reward is 0."""
    chat: bool = True
    """Put the question into a user message of the chat template; otherwise the prompt is plain text."""

    def __post_init__(self) -> None:
        library = import_optional("reasoning_gym", install="async-rl[envs]")
        try:
            self._puzzles = library.create_dataset(self.dataset, seed=self.seed, size=self.size, **self.options)
        except (ValueError, TypeError, AssertionError) as error:
            raise ConfigError(f"environment {self.name!r}: reasoning-gym cannot make {self.dataset!r}: {error}") from error

    @property
    def num_tasks(self) -> int:
        return self.size

    def task(self, index: int) -> Task:
        place = index % self.size
        puzzle = self._puzzles[place]
        text = self.instructions + puzzle["question"]
        prompt = (Message(role="user", content=text),) if self.chat else text
        return self.new_task(place, prompt, answer=str(puzzle["answer"]), puzzle=place)

    def reward(self, task: Task, response: str) -> float:
        _, found, answer = response.rpartition(self.answer_after) if self.answer_after else ("", True, response)
        puzzle = self._puzzles[int(task.data["puzzle"])]
        return float(self._puzzles.score_answer(answer.strip(), entry=puzzle)) if found else 0.0
