"""Guess the number: an environment of several turns, which answers "higher" or "lower" until the guess is right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from async_rl.protocols import GenerationArgs
from async_rl.types import Task, Turn
from rollout_workers.agents import RewardOnlyAgent


@dataclass(kw_only=True)
class GuessNumber(RewardOnlyAgent):
    """`guess1-9=` → `5` → `higher=` → `7` → ...; the reward is 1 for a hit at once, less for each further guess, 0 for none."""

    highest: int = 9
    max_turns: int = 4

    length_is_truncation = False  # a guess fills its places exactly

    def task(self, index: int) -> Task:
        secret = self.random(index).randint(1, self.highest)
        return self.new_task(index, f"guess1-{self.highest}=", answer=str(secret))

    async def get_observation(self, task: Task, turns: Sequence[Turn]) -> str | None:
        guess = turns[-1].text.strip()
        if guess == task.answer:
            return None
        if not guess.isdecimal():
            return "number="
        return "higher=" if int(guess) < int(task.answer) else "lower="

    async def trajectory_reward(self, task: Task, turns: Sequence[Turn]) -> float:
        if turns[-1].text.strip() != task.answer:
            return 0.0
        return 1.0 - (len(turns) - 1) / self.max_turns

    def generation_args(self, task: Task) -> GenerationArgs:
        return GenerationArgs(max_tokens=len(str(self.highest)))
