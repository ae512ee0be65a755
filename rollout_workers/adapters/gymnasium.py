"""Environments of Gymnasium in text: `tell` turns an observation into text, `read` turns an answer into an action.

The defaults suit discrete actions and observations that print well; for others subclass Gymnasium and define them.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from async_rl.errors import ConfigError
from async_rl.types import Task
from rollout_workers.adapters.episode_thread import EpisodeThread
from rollout_workers.adapters.import_optional import import_optional
from rollout_workers.adapters.stepped import NoAction, SteppedAgent, WorldStep


@dataclass(kw_only=True)
class Gymnasium(SteppedAgent):
    id: str
    """Its registered id: `FrozenLake-v1`, or `module:Name-v0` for one that your module registers."""
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Arguments of `gymnasium.make`: is_slippery, max_episode_steps, ..."""

    def __post_init__(self) -> None:
        library = import_optional("gymnasium", install="async-rl[envs]")
        try:
            sample = library.make(self.id, **self.options)
        except (library.error.Error, ModuleNotFoundError, TypeError, ValueError) as error:
            raise ConfigError(f"environment {self.name!r}: gymnasium cannot make {self.id!r}: {error}") from error
        sample.close()
        self._library = library
        self._actions = sample.action_space
        if type(self).read is Gymnasium.read and not isinstance(self._actions, library.spaces.Discrete):
            raise ConfigError(
                f"environment {self.name!r}: the actions of {self.id} are {self._actions}; "
                "subclass Gymnasium and define read(text), which makes one of what the model said"
            )

    def tell(self, observation: Any) -> str:
        """Return the observation as text."""
        return str(observation)

    def read(self, text: str) -> Any:
        """Return the action in an answer. Raises NoAction, whose message the model reads, if there is none."""
        numbers = re.findall(r"-?\d+", text)
        if not numbers or not self._actions.contains(action := int(numbers[-1])):
            first = int(self._actions.start)
            raise NoAction(f"Answer with a number from {first} to {first + int(self._actions.n) - 1}.")
        return action

    @asynccontextmanager
    async def world(self, task: Task) -> AsyncGenerator[_GymWorld]:
        thread = EpisodeThread(name=f"environment {self.name}")
        world = _GymWorld(self, int(task.data["seed"]), thread)
        try:
            yield world
        finally:
            thread.finish(world.close)

    def make(self) -> Any:
        return self._library.make(self.id, **self.options)


@dataclass(slots=True)
class _GymWorld:
    _agent: Gymnasium
    _seed: int
    _thread: EpisodeThread
    _env: Any = None

    async def reset(self) -> str:
        return await self._thread.run(self._reset)

    async def step(self, said: str) -> WorldStep:
        action = self._agent.read(said)
        return await self._thread.run(lambda: self._step(action))

    def close(self) -> None:
        if self._env is not None:
            self._env.close()

    def _reset(self) -> str:
        self._env = self._agent.make()
        observation, _ = self._env.reset(seed=self._seed)
        return self._agent.tell(observation)

    def _step(self, action: Any) -> WorldStep:
        observation, reward, terminated, truncated, _ = self._env.step(action)
        return WorldStep(
            told=self._agent.tell(observation),
            reward=float(reward),
            is_over=bool(terminated),
            is_cut=bool(truncated) and not terminated,
        )
