"""Environments with reset and step, as in Gymnasium and OpenEnv: the model's answers are the actions.

world.reset ─▶ text ─▶ answer ─▶ world.step ─▶ text, reward ─▶ answer ─▶ ... ─▶ the sum of the rewards
"""

from __future__ import annotations

from abc import abstractmethod
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from async_rl.imports.old_names import old_names
from async_rl.protocols import EpisodeContext, InferenceInterface
from async_rl.types import Message, Rollout, Task
from rollout_workers.agents.dialogue import Dialogue
from rollout_workers.agents.task_stream import TaskStream
from rollout_workers.episodes.rewards import Score
from rollout_workers.episodes.stage_timeouts import stage


class NoAction(ValueError):
    """An answer is not a valid action. The model reads the message and may try again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldStep:
    """The result of one action."""

    told: str
    """What the model reads next."""
    reward: float = 0.0
    is_over: bool = False
    is_cut: bool = False
    """The environment's own limit ended the episode."""
    is_action: bool = True
    """False if the answer was not a valid action."""


class World(Protocol):
    """One episode of another library's environment."""

    async def reset(self) -> str:
        """Start the episode. Returns what the model reads first."""
        ...

    async def step(self, said: str) -> WorldStep:
        """Do the action in an answer. Raises NoAction, without effect, if there is none."""
        ...


@dataclass(kw_only=True)
class SteppedAgent(TaskStream):
    """Subclass it with `world`. A task is a seed: all its siblings begin in the same place."""

    instructions: str = ""
    """Text before the first observation: what the environment is and how to write an action."""
    max_turns: int = 64
    no_action_reward: float = 0.0
    """Reward of an answer that is not an action. The model reads why and may try again, which takes a turn."""
    chat: bool = True
    """Put observations into user messages of the chat template; otherwise everything is one text."""

    @abstractmethod
    def world(self, task: Task) -> AbstractAsyncContextManager[World]:
        """Return the environment of one episode, open while it lasts."""

    def task(self, index: int) -> Task:
        return self.new_task(index, self.instructions, seed=self.random(index).getrandbits(31))

    async def rollout(self, task: Task, inference: InferenceInterface, context: EpisodeContext) -> Rollout:
        async with self.world(task) as world:
            async with stage("environment"):
                opening = self.instructions + await world.reset()
            dialogue = Dialogue(inference, (Message(role="user", content=opening),) if self.chat else opening)
            earned, misses, is_cut = 0.0, 0, False
            while (completion := await dialogue.next_answer(self.generation_args(task))) is not None:
                step = await self._stepped(world, completion.text)
                earned += step.reward
                misses += not step.is_action
                is_cut = step.is_cut or (not step.is_over and dialogue.num_turns == self.max_turns)
                if step.is_over or is_cut:
                    break
                dialogue.observe(step.told)
        return dialogue.rollout(Score(reward=earned), is_cut=is_cut, no_action=misses)

    async def _stepped(self, world: World, said: str) -> WorldStep:
        try:
            async with stage("environment"):
                return await world.step(said)
        except NoAction as problem:
            return WorldStep(told=str(problem), reward=self.no_action_reward, is_action=False)


__getattr__ = old_names(__name__)
