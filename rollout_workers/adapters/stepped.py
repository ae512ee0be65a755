"""Environments that are reset and then stepped, as Gymnasium and OpenEnv have them: the model's answers are the actions.

world.reset ─▶ told ─▶ answer ─▶ world.step ─▶ told, reward ─▶ answer ─▶ ... ─▶ the sum of the rewards
"""

from __future__ import annotations

from abc import abstractmethod
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from async_rl.protocols import ContextOverflow, EpisodeContext, InferenceInterface
from async_rl.types import Message, Rollout, Status, Task
from rollout_workers.agents.dialogue import Dialogue
from rollout_workers.agents.task_stream import TaskStream
from rollout_workers.episodes.stage_timeouts import stage


class NoAction(ValueError):
    """What the model said cannot be understood as an action; the message is what it is told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldStep:
    told: str
    reward: float = 0.0
    is_over: bool = False
    is_cut: bool = False
    """It ended because of a limit of the environment's own."""
    is_action: bool = True
    """False where the model's answer could not be understood as one."""


class World(Protocol):
    """One episode of a foreign environment."""

    async def reset(self) -> str:
        """What the model is told first."""
        ...

    async def step(self, said: str) -> WorldStep:
        """Raises NoAction, and then nothing has happened."""
        ...


@dataclass(kw_only=True)
class SteppedAgent(TaskStream):
    """Subclass it with `world`. A task is a seed: all its siblings begin in the same place."""

    instructions: str = ""
    """Stands before the first observation: what the world is and how to write an action."""
    max_turns: int = 64
    no_action_reward: float = 0.0
    """For an answer that is no action. The model is told what was wrong and may try again, which takes a turn."""
    chat: bool = True
    """Observations are a user's messages of the chat template; otherwise everything is one text."""

    @abstractmethod
    def world(self, task: Task) -> AbstractAsyncContextManager[World]:
        """The task's world, open as long as the episode lasts."""

    def task(self, index: int) -> Task:
        return self.new_task(index, self.instructions, seed=self.random(index).getrandbits(31))

    async def rollout(self, task: Task, inference: InferenceInterface, context: EpisodeContext) -> Rollout:
        async with self.world(task) as world:
            async with stage("environment"):
                opening = self.instructions + await world.reset()
            dialogue = Dialogue(inference, (Message(role="user", content=opening),) if self.chat else opening)
            earned, turns, misses, is_cut = 0.0, 0, 0, False
            while True:
                try:
                    completion = await dialogue.generate(self.generation_args(task))
                except ContextOverflow:
                    if not turns:
                        raise
                    is_cut = True
                    break
                turns += 1
                step = await self._stepped(world, completion.text)
                earned += step.reward
                misses += not step.is_action
                is_cut = step.is_cut or (not step.is_over and turns == self.max_turns)
                if step.is_over or is_cut:
                    break
                dialogue.observe(step.told)
        return Rollout(
            samples=dialogue.samples,
            reward=earned,
            status=Status.TRUNCATED if is_cut else Status.OK,
            metrics={"turns": turns, "no_action": misses},
            conversation=dialogue.conversation,
        )

    async def _stepped(self, world: World, said: str) -> WorldStep:
        try:
            async with stage("environment"):
                return await world.step(said)
        except NoAction as problem:
            return WorldStep(told=str(problem), reward=self.no_action_reward, is_action=False)
