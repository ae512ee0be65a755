"""One gate for each environment of a worker: how many of its groups fly, and whether it is being left alone.

Tickets do not choose their environment, so a gate cannot send for others: who may not enter waits. That costs a place among the
groups in flight and a slot of the buffer, hence only few may wait for a broken environment; more are turned away.
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
from rollout_workers.limits.circuit_breaker import Breaker

log = structlog.get_logger()


class TurnedAway(Exception):
    """The environment has failed too often lately, and enough groups wait for it; or the worker begins nothing more."""


@dataclass(slots=True, kw_only=True)
class Gate:
    breaker: Breaker
    places: asyncio.Semaphore | None = None
    posing: asyncio.Lock = field(default_factory=asyncio.Lock)
    is_blocking: bool = False
    """It has held up a worker, and is left alone for that."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Replaced whenever it is set."""

    def notify(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()


@dataclass(slots=True)
class Visit:
    """Of one group, to one environment. How it went must be said, or the gate learns nothing."""

    posing: asyncio.Lock
    """Held while a task is posed: whoever writes `task()` need not think of threads."""
    failure: Failure | None = None
    has_succeeded: bool = False

    def failed(self, failure: Failure) -> None:
        if failure.boundary != "inference":  # which is no fault of the environment's
            self.failure = failure

    def succeeded(self) -> None:
        self.has_succeeded = True


class Gates:
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
        self._gates: dict[str, Gate] = {}
        self._counters = counters
        self._waiting = 0
        self._are_closed = False

    def close(self) -> None:
        """Whoever waits is turned away."""
        self._are_closed = True
        for gate in self._gates.values():
            gate.notify()

    @asynccontextmanager
    async def enter(self, environment: EnvironmentConfig) -> AsyncGenerator[Visit]:
        """Waits for a place. Raises TurnedAway."""
        gate = self._gate(environment.label, environment.max_in_flight)
        await self._until_admitted(environment.label, gate)
        visit = Visit(gate.posing)
        try:
            async with gate.places if gate.places is not None else nullcontext():
                if self._are_closed:
                    raise TurnedAway(environment.label)
                yield visit
        finally:
            self._learn(environment.label, gate, visit)

    def block(self, environment: str, *, for_s: float) -> None:
        """Leave it alone, whether or not its groups failed: its code has held up a worker."""
        gate = self._gate(environment)
        gate.is_blocking = True
        gate.breaker.open(_now(), for_s=for_s)
        self._counters.rests += 1
        gate.notify()

    def _gate(self, environment: str, most: int | None = None) -> Gate:
        gate = self._gates.setdefault(
            environment, Gate(breaker=Breaker(after=self._settings.after, pause_s=self._settings.pause_s))
        )
        if gate.places is None and most is not None:
            gate.places = asyncio.Semaphore(most)
        return gate

    def _may_wait_for(self, gate: Gate) -> bool:
        """A blocking environment may be left alone for long, so its groups wait only where nothing else can be played."""
        if not gate.is_blocking:
            return self._waiting < self._may_wait()
        others = (self._gates.get(name) for name in self._played())
        return not any(other is None or other.breaker.is_closed for other in others if other is not gate)

    def _has_others(self, gate: Gate) -> bool:
        return any(other.breaker.is_closed for other in self._gates.values() if other is not gate)

    async def _until_admitted(self, name: str, gate: Gate) -> None:
        if gate.breaker.admits(_now()):
            return
        if not self._may_wait_for(gate):
            raise TurnedAway(name)
        self._waiting += 1
        try:
            while not gate.breaker.admits(_now()):
                if self._are_closed:
                    raise TurnedAway(name)
                await _change(gate.changed, gate.breaker.wait_s(_now()))
        finally:
            self._waiting -= 1

    def _learn(self, name: str, gate: Gate, visit: Visit) -> None:
        if visit.has_succeeded:
            if not gate.breaker.is_closed:
                log.info("an environment works again", environment=name)
            gate.breaker.succeeded()
            gate.is_blocking = False
        elif visit.failure is not None:
            self._learn_failure(name, gate, visit.failure)
        else:
            gate.breaker.gave_up()
        gate.notify()

    def _learn_failure(self, name: str, gate: Gate, failure: Failure) -> None:
        if gate.breaker.failed(_now(), may_open=self._has_others(gate)):
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


async def _change(changed: asyncio.Event, within_s: float | None) -> None:
    try:
        async with asyncio.timeout(within_s):
            await changed.wait()
    except TimeoutError:
        pass
