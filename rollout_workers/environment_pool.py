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
class Resident:
    name: str
    make: Callable[[], Agent]
    agent: Agent | None = None
    may_be_missing: bool = False
    """It was attached while the run goes on: a worker that cannot make it goes on with the others."""
    guests: int = 0
    """Tasks of it that are being played."""
    unavailable: str = ""
    """Why it cannot be made here."""
    leaving: asyncio.Event | None = None
    """Set to close an agent that was entered."""
    is_open: bool = False
    opening: asyncio.Lock = field(default_factory=asyncio.Lock)

    def close(self) -> None:
        """It is made again if one of its tasks is rolled again."""
        self.agent, self.is_open = None, False
        if self.leaving is not None:
            self.leaving.set()
            self.leaving = None


class Residents:
    """By name. `async with residents.open()` stands around all visits."""

    def __init__(self, residents: list[Resident]) -> None:
        self._residents = {resident.name: resident for resident in residents}
        self._keepers: asyncio.TaskGroup | None = None

    def add(self, name: str, make: Callable[[], Agent]) -> None:
        """One that is made when it is visited first, if it can be made here."""
        self._residents.setdefault(name, Resident(name=name, make=make, may_be_missing=True))

    @asynccontextmanager
    async def open(self) -> AsyncGenerator[None]:
        async with asyncio.TaskGroup() as self._keepers:
            try:
                for resident in self._residents.values():
                    await self._opened(resident)
                yield
            finally:
                for resident in self._residents.values():
                    resident.close()

    @asynccontextmanager
    async def visit(self, name: str, *, is_detached: Callable[[], bool]) -> AsyncGenerator[Agent]:
        """The agent, open at least as long as this lasts. Raises EnvironmentUnavailable."""
        resident = self._residents[name]
        resident.guests += 1
        try:
            yield await self._opened(resident)
        finally:
            resident.guests -= 1
            if is_detached():
                self.close_if_idle(name)

    def close_if_idle(self, name: str) -> None:
        if not self._residents[name].guests:
            self._residents[name].close()

    async def _opened(self, resident: Resident) -> Agent:
        async with resident.opening:
            if resident.agent is not None and resident.is_open:
                return resident.agent
            if resident.unavailable:
                raise EnvironmentUnavailable(resident.name, resident.unavailable)
            try:
                # Making one imports code of the user's, which may take its time.
                agent = resident.agent if resident.agent is not None else await asyncio.to_thread(resident.make)
                if isinstance(agent, AbstractAsyncContextManager):
                    await self._enter(resident, cast("AbstractAsyncContextManager[Any]", agent))
            except Exception as error:
                if not resident.may_be_missing:
                    raise
                resident.unavailable = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
                log.warning("an attached environment cannot be played here", name=resident.name, reason=resident.unavailable)
                raise EnvironmentUnavailable(resident.name, resident.unavailable) from error
            resident.agent, resident.is_open = agent, True
            return agent

    async def _enter(self, resident: Resident, agent: AbstractAsyncContextManager[Any]) -> None:
        if self._keepers is None:
            raise RuntimeError(f"environment {resident.name!r} must be opened: `async with` its mix")
        entered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        leaving = asyncio.Event()
        self._keepers.create_task(_keep(resident.name, agent, entered, leaving), name=f"environment {resident.name}")
        try:
            await entered
        except asyncio.CancelledError:
            leaving.set()
            raise
        resident.leaving = leaving


def entered(agent: Agent) -> AbstractAsyncContextManager[Any]:
    """Around all that is done with an agent: what it opens stays open meanwhile, if it opens anything."""
    return cast("AbstractAsyncContextManager[Any]", agent) if isinstance(agent, AbstractAsyncContextManager) else nullcontext()


async def _keep(
    name: str, agent: AbstractAsyncContextManager[Any], entered: asyncio.Future[None], leaving: asyncio.Event
) -> None:
    """Enter and leave in one task, as cancel scopes of libraries demand."""
    try:
        async with agent:
            if not entered.done():
                entered.set_result(None)
            await leaving.wait()
    except Exception as error:
        if entered.done():
            log.warning("an environment could not be closed", name=name, reason=f"{type(error).__name__}: {error}")
        else:
            entered.set_exception(error)
