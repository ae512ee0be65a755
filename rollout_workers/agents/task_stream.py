"""The tasks of an environment: an endless stream, the same in every worker."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from dataclasses import dataclass

from async_rl.protocols import GenerationArgs
from async_rl.types import Message, Scalar, Task


@dataclass(kw_only=True)
class TaskStream(ABC):
    """Base of environments and agents: the stream of their tasks.

    Decorate a subclass with `@dataclass(kw_only=True)` and its fields become the `args` of its configuration.
    """

    name: str
    """The environment's name in the configuration."""
    seed: int = 0

    @abstractmethod
    def task(self, index: int) -> Task:
        """The index-th task of an endless stream. Pure: draw what is random from `self.random(index)`."""

    def generation_args(self, task: Task) -> GenerationArgs:
        """Return how to sample; unset fields follow the run's `sampling`."""
        return GenerationArgs()

    def random(self, index: int) -> random.Random:
        """Random numbers for the index-th task, the same in every process."""
        return random.Random(f"{self.seed}/{self.name}/{index}")

    def new_task(self, index: int, prompt: str | tuple[Message, ...], *, answer: str = "", **data: Scalar) -> Task:
        """Make a task of this environment, with a key of its own. `data` is kept for `reward`."""
        key = f"{self.name}/{self.seed}/{index}"
        return Task(key=key, environment=self.name, prompt=prompt, answer=answer, data=data)
