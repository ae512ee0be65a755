"""An environment of your own: say the letters backwards."""

from async_rl import Task
from rollout_workers import Environment


class Backwards(Environment):
    def task(self, index: int) -> Task:
        letters = "".join(self.random(index).choices("abc", k=4))
        return self.new_task(index, letters + "=", answer=letters[::-1])

    async def reward(self, task: Task, response: str) -> float:
        right = sum(said == wanted for said, wanted in zip(response, task.answer, strict=False))
        return right / max(len(response), len(task.answer))
