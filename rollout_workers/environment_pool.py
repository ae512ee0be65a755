"""The environments of a worker: made when first needed, entered if they are async context managers, closed when unused."""

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
    """An environment attached to the running run cannot be made in this process. Other workers may be able to."""

    def __init__(self, environment: str, reason: str) -> None:
        super().__init__(f"environment {environment!r} cannot be played here: {reason}")
        self.environment = environment


@dataclass(slots=True, kw_only=True)
class PooledEnvironment:
    name: str
    make: Callable[[], Agent]
    agent: Agent | None = None
    is_attached: bool = False
    """It was attached while the run was going on: a worker that cannot make it continues with the others."""
    num_users: int = 0
    """Groups that are using it now."""
    unavailable: str = ""
    """Why it cannot be made here; empty while no attempt has failed."""
    closing: asyncio.Event | None = None
    """Set to close an agent that was entered as a context manager."""
    is_open: bool = False
    opening: asyncio.Lock = field(default_factory=asyncio.Lock)

    def close(self) -> None:
        """Close the agent. It is made again if one of its tasks is rolled out again."""
        self.agent, self.is_open = None, False
        if self.closing is not None:
            self.closing.set()
            self.closing = None


class EnvironmentPool:
    """Environments by name. Use them inside `async with pool.open()`."""

    def __init__(self, environments: list[PooledEnvironment]) -> None:
        self._environments = {pooled.name: pooled for pooled in environments}
        self._owners: asyncio.TaskGroup | None = None

    def add(self, name: str, make: Callable[[], Agent]) -> None:
        """Add an environment that is made when first used, if it can be made here."""
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
        """Yield the agent, kept open meanwhile. Raises EnvironmentUnavailable."""
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
                # Making one imports user code, which may block for long.
                agent = pooled.agent if pooled.agent is not None else await asyncio.to_thread(pooled.make)
                if isinstance(agent, AbstractAsyncContextManager):
                    await self._enter(pooled, cast("AbstractAsyncContextManager[Any]", agent))
            except Exception as error:
                if not pooled.is_attached:
                    raise
                pooled.unavailable = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
                log.warning("an attached environment cannot be made here", name=pooled.name, reason=pooled.unavailable)
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
    """Enter the agent if it is an async context manager; else do nothing."""
    return cast("AbstractAsyncContextManager[Any]", agent) if isinstance(agent, AbstractAsyncContextManager) else nullcontext()


async def _hold_open(
    name: str, agent: AbstractAsyncContextManager[Any], entered: asyncio.Future[None], closing: asyncio.Event
) -> None:
    """Enter and leave in one task, as the cancel scopes of some libraries demand."""
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
