"""Limits of each environment of a worker: how many of its groups run at once, and its circuit breaker.

A ticket already belongs to one environment, so a group that may not start waits here. It then holds one of the worker's
places and a slot of the buffer, so only a few groups may wait for a broken environment; the others are handed back.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field

import structlog

from async_rl.config.rollout import BreakerConfig, EnvironmentConfig
from async_rl.types import Failure
from rollout_workers.counters import Counters
from rollout_workers.limits.circuit_breaker import CircuitBreaker

log = structlog.get_logger()


class NotAdmitted(Exception):
    """The environment has failed too often lately, and enough groups wait for it; or the worker begins nothing more."""


@dataclass(slots=True, kw_only=True)
class EnvironmentState:
    breaker: CircuitBreaker
    slots: asyncio.Semaphore | None = None
    task_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    is_blocking: bool = False
    """It has held up a worker, and is left alone for that."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Replaced whenever it is set."""

    def notify(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()


@dataclass(slots=True)
class GroupAttempt:
    """Of one group, to one environment. How it went must be said, or the state learns nothing."""

    task_lock: asyncio.Lock
    """Held while a task is posed: whoever writes `task()` need not think of threads."""
    failure: Failure | None = None
    has_succeeded: bool = False

    def failed(self, failure: Failure) -> None:
        if failure.boundary != "inference":  # which is no fault of the environment's
            self.failure = failure

    def succeeded(self) -> None:
        self.has_succeeded = True


class EnvironmentLimits:
    def __init__(
        self,
        settings: BreakerConfig,
        counters: Counters,
        *,
        may_wait: Callable[[], int],
        played: Callable[[], Collection[str]],
    ) -> None:
        """`may_wait` says how many groups may wait for broken environments, `played` which environments the run has."""
        self._played = played
        self._settings = settings
        self._may_wait = may_wait
        self._states: dict[str, EnvironmentState] = {}
        self._counters = counters
        self._waiting = 0
        self._is_closed = False

    def close(self) -> None:
        """Whoever waits is turned away."""
        self._is_closed = True
        for state in self._states.values():
            state.notify()

    @asynccontextmanager
    async def enter(self, environment: EnvironmentConfig) -> AsyncGenerator[GroupAttempt]:
        """Waits for a place. Raises NotAdmitted."""
        state = self._state(environment.label, environment.max_in_flight)
        await self._until_admitted(environment.label, state)
        attempt = GroupAttempt(state.task_lock)
        try:
            async with state.slots if state.slots is not None else nullcontext():
                if self._is_closed:
                    raise NotAdmitted(environment.label)
                yield attempt
        finally:
            self._record(environment.label, state, attempt)

    def block(self, environment: str, *, for_s: float) -> None:
        """Leave it alone, whether or not its groups failed: its code has held up a worker."""
        state = self._state(environment)
        state.is_blocking = True
        state.breaker.open(_now(), for_s=for_s)
        self._counters.rests += 1
        state.notify()

    def _state(self, environment: str, most: int | None = None) -> EnvironmentState:
        state = self._states.setdefault(
            environment, EnvironmentState(breaker=CircuitBreaker(after=self._settings.after, pause_s=self._settings.pause_s))
        )
        if state.slots is None and most is not None:
            state.slots = asyncio.Semaphore(most)
        return state

    def _may_wait_for(self, state: EnvironmentState) -> bool:
        """A blocking environment may be left alone for long, so its groups wait only where nothing else can be played."""
        if not state.is_blocking:
            return self._waiting < self._may_wait()
        others = (self._states.get(name) for name in self._played())
        return not any(other is None or other.breaker.is_closed for other in others if other is not state)

    def _has_others(self, state: EnvironmentState) -> bool:
        return any(other.breaker.is_closed for other in self._states.values() if other is not state)

    async def _until_admitted(self, name: str, state: EnvironmentState) -> None:
        if state.breaker.admits(_now()):
            return
        if not self._may_wait_for(state):
            raise NotAdmitted(name)
        self._waiting += 1
        try:
            while not state.breaker.admits(_now()):
                if self._is_closed:
                    raise NotAdmitted(name)
                await _wait(state.changed, state.breaker.wait_s(_now()))
        finally:
            self._waiting -= 1

    def _record(self, name: str, state: EnvironmentState, attempt: GroupAttempt) -> None:
        if attempt.has_succeeded:
            if not state.breaker.is_closed:
                log.info("an environment works again", environment=name)
            state.breaker.succeeded()
            state.is_blocking = False
        elif attempt.failure is not None:
            self._record_failure(name, state, attempt.failure)
        else:
            state.breaker.trial_ended_without_result()
        state.notify()

    def _record_failure(self, name: str, state: EnvironmentState, failure: Failure) -> None:
        if state.breaker.failed(_now(), may_open=self._has_others(state)):
            self._counters.rests += 1
            log.warning(
                f"an environment is left alone for {self._settings.pause_s:g} s: its last {self._settings.after} groups failed",
                environment=name,
                boundary=failure.boundary,
                kind=failure.kind,
                message=failure.message,
            )


def _now() -> float:
    return asyncio.get_running_loop().time()


async def _wait(changed: asyncio.Event, within_s: float | None) -> None:
    try:
        async with asyncio.timeout(within_s):
            await changed.wait()
    except TimeoutError:
        pass
