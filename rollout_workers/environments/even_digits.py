"""Seven random digits; the answer should be even digits only. The easiest task to learn."""

from __future__ import annotations

from dataclasses import dataclass

from async_rl.protocols import GenerationArgs
from async_rl.types import Task
from rollout_workers.agents import RewardOnlyAgent


@dataclass(kw_only=True)
class EvenDigits(RewardOnlyAgent):
    """`4711983=` → `2408...`; the reward is the share of the `max_tokens` places that hold an even digit."""

    max_tokens: int = 32
    prompt_digits: int = 7

    length_is_truncation = False  # a full-length answer is the best one

    def task(self, index: int) -> Task:
        digits = self.random(index).choices("0123456789", k=self.prompt_digits)
        return self.new_task(index, "".join(digits) + "=")

    async def reward(self, task: Task, response: str) -> float:
        even = sum(character in "02468" for character in response)
        return even / self.max_tokens  # not / len(response): stopping early must not pay

    def generation_args(self, task: Task) -> GenerationArgs:
        return GenerationArgs(max_tokens=self.max_tokens)
