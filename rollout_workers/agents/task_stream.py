"""Where an agent's tasks come from: an endless stream that every worker sees alike."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from dataclasses import dataclass

from async_rl.protocols import GenerationArgs
from async_rl.types import Message, Scalar, Task


@dataclass(kw_only=True)
class TaskStream(ABC):
    """Half of an agent: what the tasks are. How they are played is said by its subclasses.

    Decorate a subclass with `@dataclass(kw_only=True)` and its fields become the `args` of its configuration.
    """

    name: str
    """Under which the environment stands in the configuration."""
    seed: int = 0

    @abstractmethod
    def task(self, index: int) -> Task:
        """The index-th task of an endless stream. Pure: draw what is random from `self.random(index)`."""

    def generation_args(self, task: Task) -> GenerationArgs:
        """How to sample; what is not set here follows the run's `sampling`."""
        return GenerationArgs()

    def random(self, index: int) -> random.Random:
        """Chance for the index-th task, the same in every process."""
        return random.Random(f"{self.seed}/{self.name}/{index}")

    def new_task(self, index: int, prompt: str | tuple[Message, ...], *, answer: str = "", **data: Scalar) -> Task:
        key = f"{self.name}/{self.seed}/{index}"
        return Task(key=key, environment=self.name, prompt=prompt, answer=answer, data=data)
