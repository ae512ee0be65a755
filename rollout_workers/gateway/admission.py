"""Limit the concurrent generations of one episode, and end them with the episode."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from async_rl.config.rollout import GatewayConfig
from rollout_workers.gateway.counters import GatewayCounters
from rollout_workers.gateway.request_errors import RequestError, closed


class Admission:
    def __init__(self, settings: GatewayConfig, counters: GatewayCounters) -> None:
        self._settings = settings
        self._counters = counters
        self._is_closed = False
        self._running = 0
        self._open: set[asyncio.Timeout] = set()
        """One for each request with running generations."""
        self._idle = asyncio.Event()
        self._idle.set()

    @asynccontextmanager
    async def admit(self, generations: int) -> AsyncIterator[None]:
        """Reserve room for `generations`. The block is cancelled when the episode ends or the request times out."""
        self._check(generations)
        waiting = asyncio.timeout(self._settings.request_timeout_s)
        self._running += generations
        self._counters.generations += generations
        self._open.add(waiting)
        self._idle.clear()
        try:
            async with waiting:
                yield
        except TimeoutError:
            if not waiting.expired():
                raise
            if self._is_closed:
                raise closed() from None
            limit = self._settings.request_timeout_s
            raise RequestError(503, f"no answer within worker.gateway.request_timeout_s={limit}", kind="timeout") from None
        finally:
            self._running -= generations
            self._counters.generations -= generations
            self._open.discard(waiting)
            if not self._open:
                self._idle.set()

    def _check(self, generations: int) -> None:
        limit = self._settings.max_concurrent
        if self._is_closed:
            raise closed()
        if generations > limit:
            raise RequestError(
                400, f"n={generations} exceeds the {limit} generations that worker.gateway.max_concurrent allows", param="n"
            )
        if self._running + generations > limit:
            raise RequestError(
                429, f"this episode runs {self._running} generations already; {limit} may run at once", kind="busy"
            )

    async def close(self) -> None:
        """Refuse new requests, cancel running ones and wait until they have ended."""
        self._is_closed = True
        now = asyncio.get_running_loop().time()
        for waiting in self._open:
            if not waiting.expired():
                waiting.reschedule(now)
        await self._idle.wait()
