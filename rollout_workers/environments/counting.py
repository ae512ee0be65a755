"""Count on from a digit, from 9 to 0 again: progress shows at a glance in the answers."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from async_rl.protocols import GenerationArgs
from async_rl.types import Task
from rollout_workers.agents import RewardOnlyAgent

STEPS = {(str(digit), str((digit + 1) % 10)) for digit in range(10)}


@dataclass(kw_only=True)
class Counting(RewardOnlyAgent):
    """`3=` → `4567890123...`; the reward is the share of the `length` places that are one more than the place before.

    After a mistake, counting on from there is right again, so every step of the answer can be learned.
    """

    length: int = 16

    length_is_truncation = False  # a full-length answer is the best one

    def task(self, index: int) -> Task:
        start = self.random(index).randrange(10)
        answer = "".join(str((start + step) % 10) for step in range(1, self.length + 1))
        return self.new_task(index, f"{start}=", answer=answer)

    async def reward(self, task: Task, response: str) -> float:
        begins_right = response[:1] == task.answer[0]
        return (begins_right + sum(step in STEPS for step in pairwise(response))) / self.length

    def generation_args(self, task: Task) -> GenerationArgs:
        return GenerationArgs(max_tokens=self.length)
