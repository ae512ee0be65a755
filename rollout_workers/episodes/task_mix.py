"""Map a ticket's task index to an environment and one of its tasks, identically in every worker."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Self

import structlog

from async_rl.board.attached_code import refuse_foreign_code, refuse_foreign_files
from async_rl.board.environment_mix import MixSchedule
from async_rl.config.rollout import EnvironmentConfig
from async_rl.protocols import Agent
from async_rl.types import MixChange
from rollout_workers.environment_pool import EnvironmentPool, EnvironmentUnavailable, PooledEnvironment
from rollout_workers.registry import build_agent

logger = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSource:
    """Where a task comes from: `agent.task(index)`."""

    environment: EnvironmentConfig
    agent: Agent
    index: int


class EnvironmentDetached(Exception):
    """The environment was detached from the run: its tasks are not rolled out again."""


class TaskMix:
    """Distribute task indexes over the environments by weight, also while the weights change (board/environment_mix.py).

    Each environment sees its own stream 0, 1, 2, ... without gaps, spread evenly over the whole.
    """

    def __init__(
        self,
        environments: Sequence[tuple[EnvironmentConfig, Agent]],
        *,
        seed: int = 0,
        environments_from: Sequence[str] = (),
        has_joined: bool = False,
    ) -> None:
        """`has_joined`: attached environments may read only files inside `environments_from`."""
        self._seed = seed
        self._environments_from, self._has_joined = environments_from, has_joined
        self._sections = [section for section, _ in environments]
        self._pool = EnvironmentPool(
            [
                PooledEnvironment(name=section.label, make=partial(build_agent, section, seed), agent=agent)
                for section, agent in environments
            ]
        )
        self._log: tuple[MixChange, ...] = ()
        self._schedules = {"": MixSchedule(self._sections)}
        """Schedules by the id of the latest change they include."""

    @classmethod
    def from_config(
        cls,
        environments: Sequence[EnvironmentConfig],
        seed: int,
        *,
        environments_from: Sequence[str] = (),
        has_joined: bool = False,
    ) -> Self:
        """Make the environments of a configuration. Raises ConfigError when one cannot be made."""
        made = [(section, build_agent(section, seed)) for section in environments if not section.evaluation_only]
        return cls(made, seed=seed, environments_from=environments_from, has_joined=has_joined)

    def knows(self, mix: str) -> bool:
        """Return whether the changes up to `mix` are known here."""
        return mix in self._schedules or any(change.id == mix for change in self._log)

    def follow(self, changes: Sequence[MixChange]) -> None:
        """Adopt the whole log of changes. Detached environments are closed after their last episode."""
        if (log := tuple(changes)) == self._log:  # several tickets lead here at once
            return
        self._log = log
        self._schedules = {"": self._schedules[""]}
        latest = self._latest
        for name, section in latest.sections.items():
            self._pool.add(name, partial(self._make_attached, section))
            if name not in latest.final_weights:
                self._pool.close_if_idle(name)
        logger.info("the mix of environments changes", weights=latest.final_weights)

    def _make_attached(self, section: EnvironmentConfig) -> Agent:
        refuse_foreign_code(section, self._sections, self._environments_from)
        if self._has_joined:
            refuse_foreign_files(section, self._environments_from)
        return build_agent(section, self._seed)

    @property
    def _latest(self) -> MixSchedule:
        return self._schedule(self._log[-1].id if self._log else "")

    def _schedule(self, mix: str) -> MixSchedule:
        """The schedule under the changes up to `mix`. A buffer restored from an older state may lack changes known here."""
        if mix not in self._schedules:
            if not self.knows(mix):
                raise EnvironmentUnavailable("?", "its mix is one that the buffer has lost")
            heard = [change.id for change in self._log].index(mix) + 1
            self._schedules[mix] = MixSchedule(self._sections, self._log[:heard])
        return self._schedules[mix]

    @property
    def played(self) -> Collection[str]:
        """Names of the environments that are not detached."""
        return tuple(self._latest.final_weights)

    def open(self) -> AbstractAsyncContextManager[None]:
        """Enter around all uses of `source`. Agents of the configuration are entered now, attached ones when needed."""
        return self._pool.open()

    @asynccontextmanager
    async def source(self, task_index: int, mix: str = "", *, is_rolled_again: bool = False) -> AsyncGenerator[TaskSource]:
        """Yield the source of a task, kept open meanwhile. Raises EnvironmentUnavailable, and EnvironmentDetached for a task
        to be rolled out again whose environment was detached meanwhile.
        """
        schedule = self._schedule(mix)
        place = schedule.place(task_index)
        name = place.environment
        if is_rolled_again and name not in self._latest.final_weights:
            raise EnvironmentDetached(name)
        async with self._pool.use(name, is_detached=lambda: name not in self._latest.final_weights) as agent:
            yield TaskSource(environment=schedule.sections[name], agent=agent, index=place.index)
