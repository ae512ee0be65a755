"""What the servers of test_env_serve.py play."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from async_rl.protocols import EpisodeContext, InferenceInterface
from async_rl.testing import EchoAgent
from async_rl.types import Rollout, Task, Turn
from rollout_workers.agents import RewardOnlyAgent

entered: list[str] = []
"""By the seed of the run: agents of the servers in this process."""
cancelled = asyncio.Event()


class Siblings(EchoAgent):
    """Played together: the reward says in which place."""

    async def rollout_group(
        self, task: Task, inference: InferenceInterface, contexts: Sequence[EpisodeContext]
    ) -> Sequence[Rollout]:
        rollouts = [await self.rollout(task, inference, context) for context in contexts]
        return [
            Rollout(samples=each.samples, reward=context.sibling + context.seed / 10, status=each.status)
            for each, context in zip(rollouts, contexts, strict=True)
        ]


class Keeps(RewardOnlyAgent):
    """Opened once for each run."""

    async def __aenter__(self) -> Keeps:
        entered.append(f"{self.name}/{self.seed}")
        return self

    async def __aexit__(self, *problem: object) -> None:
        entered.remove(f"{self.name}/{self.seed}")

    def task(self, index: int) -> Task:
        return self.new_task(index, f"{self.random(index).randrange(10)}=", answer="1")

    async def reward(self, task: Task, response: str) -> float:
        return len(response)


class Hangs(EchoAgent):
    async def rollout(self, task: Task, inference: InferenceInterface, context: EpisodeContext) -> Rollout:
        try:
            await inference.generate(task.prompt)
            return await asyncio.Future[Rollout]()
        finally:
            cancelled.set()


class Impatient(EchoAgent):
    """Gives the model no time."""

    async def rollout(self, task: Task, inference: InferenceInterface, context: EpisodeContext) -> Rollout:
        try:
            async with asyncio.timeout(1):
                await inference.generate("never")
        except TimeoutError:
            return await EchoAgent.rollout(self, task, inference, context)
        raise AssertionError


class Chatty(RewardOnlyAgent):
    """Talks until the context is full, and asks the judge, if there is one."""

    def task(self, index: int) -> Task:
        return self.new_task(index, "7=")

    async def get_observation(self, task: Task, turns: Sequence[Turn]) -> str | None:
        return "+"

    async def reward(self, task: Task, response: str) -> float:
        return float(len(response))


class Judged(EchoAgent):
    async def rollout(self, task: Task, inference: InferenceInterface, context: EpisodeContext) -> Rollout:
        rollout = await EchoAgent.rollout(self, task, inference, context)
        verdict = await context.policies["judge"].generate("how good?")
        return Rollout(samples=rollout.samples, reward=float(verdict.text), status=rollout.status)


class Refuses(EchoAgent):
    async def rollout(self, task: Task, inference: InferenceInterface, context: EpisodeContext) -> Rollout:
        raise LookupError("no such room")
