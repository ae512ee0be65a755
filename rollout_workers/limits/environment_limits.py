"""Limits of each environment of a worker: how many of its groups run at once, and its circuit breaker.

A ticket already belongs to one environment, so a group that may not start waits here. It then holds one of the worker's
places and a slot of the buffer, so only a few groups may wait for a broken environment; the others are handed back.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field

import structlog

from async_rl.config.rollout import BreakerConfig, EnvironmentConfig
from async_rl.types import Failure
from rollout_workers.counters import Counters
from rollout_workers.limits.circuit_breaker import CircuitBreaker

log = structlog.get_logger()


class NotAdmitted(Exception):
    """The environment's breaker is open and enough groups wait for it already, or the worker is draining."""


@dataclass(slots=True, kw_only=True)
class EnvironmentState:
    breaker: CircuitBreaker
    slots: asyncio.Semaphore | None = None
    task_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    is_blocking: bool = False
    """It is paused because it blocked a worker's event loop."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set, and replaced by a new event, at every change."""

    def notify(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()


@dataclass(slots=True)
class GroupAttempt:
    """One group admitted to an environment. Its result, reported here, moves the circuit breaker."""

    task_lock: asyncio.Lock
    """Held while `task()` runs, so that it need not be thread-safe."""
    failure: Failure | None = None
    has_succeeded: bool = False

    def failed(self, failure: Failure) -> None:
        if failure.boundary != "inference":  # a broken engine is not the environment's fault
            self.failure = failure


@dataclass(slots=True)
class EnvironmentLimits:
    settings: BreakerConfig
    counters: Counters
    may_wait: Callable[[], int]
    """Returns how many groups may wait for broken environments."""
    played: Callable[[], Collection[str]]
    """Returns the environments of the run."""
    _states: dict[str, EnvironmentState] = field(default_factory=dict[str, EnvironmentState])
    _waiting: int = 0
    _is_closed: bool = False

    def close(self) -> None:
        """Admit nothing more: waiting groups raise NotAdmitted."""
        self._is_closed = True
        for state in self._states.values():
            state.notify()

    @asynccontextmanager
    async def admit(self, environment: EnvironmentConfig) -> AsyncGenerator[GroupAttempt]:
        """Wait until a group of the environment may start. Raises NotAdmitted."""
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

    def block(self, environment: str, for_s: float) -> None:
        """Start none of its groups for `for_s` seconds, unless no other is left: its code blocked a worker's event loop."""
        state = self._state(environment)
        state.is_blocking = True
        state.breaker.open(_now(), for_s=for_s)
        self.counters.pauses += 1
        state.notify()

    def _state(self, environment: str, most: int | None = None) -> EnvironmentState:
        state = self._states.setdefault(
            environment, EnvironmentState(breaker=CircuitBreaker(after=self.settings.after, pause_s=self.settings.pause_s))
        )
        if state.slots is None and most is not None:
            state.slots = asyncio.Semaphore(most)
        return state

    def _may_wait_in(self, state: EnvironmentState) -> bool:
        """A blocking environment may be paused for long, so its groups wait only if no other environment works."""
        if not state.is_blocking:
            return self._waiting < self.may_wait()
        others = (self._states.get(name) for name in self.played())
        return not any(other is None or other.breaker.is_closed for other in others if other is not state)

    async def _until_admitted(self, name: str, state: EnvironmentState) -> None:
        if state.breaker.admits(_now()):
            return
        if not self._may_wait_in(state):
            raise NotAdmitted(name)
        self._waiting += 1
        try:
            while not state.breaker.admits(_now()):
                if self._is_closed:
                    raise NotAdmitted(name)
                with suppress(TimeoutError):
                    async with asyncio.timeout(state.breaker.wait_s(_now())):
                        await state.changed.wait()
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
        has_others = any(other.breaker.is_closed for other in self._states.values() if other is not state)
        if state.breaker.failed(_now(), may_open=has_others):
            self.counters.pauses += 1
            log.warning(
                f"an environment is paused for {self.settings.pause_s:g} s: its last {self.settings.after} groups failed",
                environment=name,
                boundary=failure.boundary,
                kind=failure.kind,
                message=failure.message,
            )


def _now() -> float:
    return asyncio.get_running_loop().time()
