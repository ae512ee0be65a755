"""The cells of the study of age: which task is trained with which objective at which age, in order of value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import end_to_end

GROUPS_PER_STEP = 8
USUAL_BETA2 = 0.999


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A task of the study: what differs from configs/end_to_end.yaml."""

    target: float
    steps: int
    """Steps after which a run at age 0 that has not reached the target ends."""
    settings: Mapping[str, str]
    window: int = 5
    """Successive step batches whose mean reward is compared with the target."""


TASKS = {
    "even_digits": Task(target=0.9, steps=120, settings={}),
    "counting": Task(
        target=0.9,
        steps=200,
        settings={
            "environments": "[{type: counting, args: {length: 12}}]",
            "tokenizer.alphabet": "0123456789=",
            "sampling.max_tokens": "12",
            "model.size.layers": "2",
            "batch.group_size": "16",
        },
    ),
    "guess_number": Task(  # two turns; the best strategy begins with the middle and earns 2/3
        target=0.6,
        window=20,  # with 40 secrets in 5 batches, a policy that earns 0.5 would soon have a lucky window
        steps=400,
        settings={
            "environments": "[{type: guess_number, args: {highest: 3, max_turns: 2}}]",
            "tokenizer.alphabet": "0123456789=-beghilmnorsuw",
            "sampling.max_tokens": "1",
            "model.size.layers": "2",
            "batch.group_size": "16",
        },
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One run of the study."""

    task: str
    objective: str
    age: int
    learning_rate: float
    beta2: float = USUAL_BETA2
    """Of Adam: how long it remembers the size of gradients."""
    seed: int

    @property
    def optimizer(self) -> str:
        return f"lr{self.learning_rate:g}" + (f"-beta{self.beta2:g}" if self.beta2 != USUAL_BETA2 else "")

    @property
    def name(self) -> str:
        return f"{self.task}/{self.objective}/age{self.age}/{self.optimizer}/seed{self.seed}"

    @property
    def steps(self) -> int:
        """Steps of a run that does not reach the target: at a high age the first steps see the initial weights only."""
        return TASKS[self.task].steps + 3 * self.age

    def words(self, folder: Path) -> list[str]:
        """Return the arguments of `async-rl run`."""
        settings = {
            "run.folder": str(folder),
            "run.name": "cell",
            "run.seed": str(self.seed),
            "learner.objective": self.objective,
            "learner.steps": str(self.steps),
            "learner.checkpoint_every": "1000",
            "learner.optimizer.learning_rate": repr(self.learning_rate),
            "learner.optimizer.betas": f"[0.9, {self.beta2}]",
            "staleness.max_age": str(self.age),
            "staleness.pace": "full",
            **TASKS[self.task].settings,
        }
        if self.age >= 2:  # the learner waits until the buffer is full, or its speed would decide the age
            settings |= {
                "replay.samples_per_insert": "1.0",
                "replay.min_groups": str(GROUPS_PER_STEP * (self.age - 1)),
                "replay.error_buffer": str(float(GROUPS_PER_STEP)),
            }
        return ["@", str(end_to_end.CONFIG), *(word for key, value in settings.items() for word in (f"--{key}", value))]


def cells_of(
    tasks: Iterable[str],
    objectives: Iterable[str],
    ages: Iterable[int],
    *,
    learning_rate: float = 1e-3,
    beta2: float = USUAL_BETA2,
    seeds: Iterable[int],
) -> list[Cell]:
    combinations = product(seeds, tasks, objectives, ages)
    return [
        Cell(task=task, objective=objective, age=age, learning_rate=learning_rate, beta2=beta2, seed=seed)
        for seed, task, objective, age in combinations
    ]


COMPARED = ("async_default", "grpo")
OTHERS = ("decoupled_ppo", "cispo", "tis", "gspo", "icepop", "reinforce")
AGES = (0, 1, 2, 8, 64)
CELLS = [
    *cells_of(["even_digits", "counting"], COMPARED, (0, 8, 64, 1), seeds=(1, 2, 3)),
    *cells_of(["even_digits"], OTHERS, (8, 64, 1), seeds=(1, 2, 3)),
    *cells_of(["even_digits"], ["async_default"], (1, 8, 64), learning_rate=3e-4, seeds=(1, 2, 3)),
    *cells_of(["guess_number"], COMPARED, (0, 8, 64, 1), seeds=(1, 2, 3)),
    *cells_of(["even_digits"], ["async_default"], (0, 1, 8, 64), seeds=(4, 5)),
    *cells_of(TASKS, COMPARED, (2,), seeds=(1, 2, 3)),
    *cells_of(["even_digits"], ["async_default"], (2,), seeds=(4, 5)),
    *cells_of(["guess_number"], ["async_default"], (8, 64), learning_rate=5e-4, seeds=(1, 2, 3)),
    *cells_of(["guess_number"], ["async_default"], (8,), seeds=(4, 5)),
    *cells_of(["guess_number"], ["async_default"], (8,), learning_rate=5e-4, seeds=(4, 5)),
    *cells_of(["guess_number"], ["async_default"], (1, 8), beta2=0.95, seeds=(1, 2, 3)),
]
"""In order of value, so that what was collected when time ran out says most."""
