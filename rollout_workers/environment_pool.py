"""The agents of a worker's environments: made, opened when they are async context managers, closed when nobody needs them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

import structlog

from async_rl.errors import ConfigError
from async_rl.protocols import Agent

log = structlog.get_logger()


class EnvironmentUnavailable(Exception):
    """This worker cannot play an environment that was attached to the run: others may."""

    def __init__(self, environment: str, reason: str) -> None:
        super().__init__(f"environment {environment!r} cannot be played here: {reason}")
        self.environment = environment


@dataclass(slots=True, kw_only=True)
class PooledEnvironment:
    name: str
    make: Callable[[], Agent]
    agent: Agent | None = None
    is_attached: bool = False
    """It was attached while the run goes on: a worker that cannot make it goes on with the others."""
    num_users: int = 0
    """Tasks of it that are being played."""
    unavailable: str = ""
    """Why it cannot be made here."""
    closing: asyncio.Event | None = None
    """Set to close an agent that was entered."""
    is_open: bool = False
    opening: asyncio.Lock = field(default_factory=asyncio.Lock)

    def close(self) -> None:
        """It is made again if one of its tasks is rolled again."""
        self.agent, self.is_open = None, False
        if self.closing is not None:
            self.closing.set()
            self.closing = None


class EnvironmentPool:
    """By name. `async with environments.open()` stands around all visits."""

    def __init__(self, environments: list[PooledEnvironment]) -> None:
        self._environments = {pooled.name: pooled for pooled in environments}
        self._owners: asyncio.TaskGroup | None = None

    def add(self, name: str, make: Callable[[], Agent]) -> None:
        """One that is made when it is visited first, if it can be made here."""
        self._environments.setdefault(name, PooledEnvironment(name=name, make=make, is_attached=True))

    @asynccontextmanager
    async def open(self) -> AsyncGenerator[None]:
        async with asyncio.TaskGroup() as self._owners:
            try:
                for pooled in self._environments.values():
                    await self._opened(pooled)
                yield
            finally:
                for pooled in self._environments.values():
                    pooled.close()

    @asynccontextmanager
    async def use(self, name: str, *, is_detached: Callable[[], bool]) -> AsyncGenerator[Agent]:
        """The agent, open at least as long as this lasts. Raises EnvironmentUnavailable."""
        pooled = self._environments[name]
        pooled.num_users += 1
        try:
            yield await self._opened(pooled)
        finally:
            pooled.num_users -= 1
            if is_detached():
                self.close_if_idle(name)

    def close_if_idle(self, name: str) -> None:
        if not self._environments[name].num_users:
            self._environments[name].close()

    async def _opened(self, pooled: PooledEnvironment) -> Agent:
        async with pooled.opening:
            if pooled.agent is not None and pooled.is_open:
                return pooled.agent
            if pooled.unavailable:
                raise EnvironmentUnavailable(pooled.name, pooled.unavailable)
            try:
                # Making one imports code of the user's, which may take its time.
                agent = pooled.agent if pooled.agent is not None else await asyncio.to_thread(pooled.make)
                if isinstance(agent, AbstractAsyncContextManager):
                    await self._enter(pooled, cast("AbstractAsyncContextManager[Any]", agent))
            except Exception as error:
                if not pooled.is_attached:
                    raise
                pooled.unavailable = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
                log.warning("an attached environment cannot be played here", name=pooled.name, reason=pooled.unavailable)
                raise EnvironmentUnavailable(pooled.name, pooled.unavailable) from error
            pooled.agent, pooled.is_open = agent, True
            return agent

    async def _enter(self, pooled: PooledEnvironment, agent: AbstractAsyncContextManager[Any]) -> None:
        if self._owners is None:
            raise RuntimeError(f"environment {pooled.name!r} must be opened: `async with` its mix")
        entered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        closing = asyncio.Event()
        self._owners.create_task(_hold_open(pooled.name, agent, entered, closing), name=f"environment {pooled.name}")
        try:
            await entered
        except asyncio.CancelledError:
            closing.set()
            raise
        pooled.closing = closing


def opened(agent: Agent) -> AbstractAsyncContextManager[Any]:
    """Around all that is done with an agent: what it opens stays open meanwhile, if it opens anything."""
    return cast("AbstractAsyncContextManager[Any]", agent) if isinstance(agent, AbstractAsyncContextManager) else nullcontext()


async def _hold_open(
    name: str, agent: AbstractAsyncContextManager[Any], entered: asyncio.Future[None], closing: asyncio.Event
) -> None:
    """Enter and leave in one task, as cancel scopes of libraries demand."""
    try:
        async with agent:
            if not entered.done():
                entered.set_result(None)
            await closing.wait()
    except Exception as error:
        if entered.done():
            log.warning("an environment could not be closed", name=name, reason=f"{type(error).__name__}: {error}")
        else:
            entered.set_exception(error)
