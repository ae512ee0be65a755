"""Reads what the page shows of a living run, as any of its users may. It changes nothing, except that `stats` collects leases
that were lost, where its user may do that.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self, cast
from urllib.parse import urlsplit

from pydantic import ValidationError

from async_rl.board.worker_reports import BLOCKED, NOTES, WorkerBlocked, WorkerNote
from async_rl.config import Config
from async_rl.errors import AsyncRLError
from async_rl.protocols import Member
from async_rl.telemetry import WORKER_METRICS
from async_rl.view.live import LiveState, WorkerMessage, WorkerState
from buffer import open_buffer_on
from buffer.board import RedisBoard
from buffer.inspection import Inspection
from buffer.redis_buffer import RedisBuffer
from buffer.run_in_redis import RunInRedis
from buffer.server.client import open_server
from buffer.tools.stats import waits_for

PATIENCE_S = 2.0
"""How long a request waits for Redis before the page says that it does not answer."""
FRESH_S = 1.0
"""Requests within this time share one reading."""
COUNTERS_S = 120.0
"""How far back workers' counters are read at the start."""
NOTES_KEPT, LONGEST_NOTE = 50, 2000


class RedisLiveSource:
    """Connects at the first reading, and again after an error. A context manager that closes the connection."""

    def __init__(self, config: Config) -> None:
        # Payloads are not read, so that no folder of theirs is opened.
        redis = config.redis.model_copy(update={"connect_timeout_s": PATIENCE_S, "payloads": "redis"})
        self._config = config.model_copy(update={"redis": redis})
        self._connected: AsyncExitStack | None = None
        self._buffer: RedisBuffer
        self._board: RedisBoard
        self._inspection: Inspection
        self._reading = asyncio.Lock()
        self._read_at = -FRESH_S
        self._state: LiveState | str = ""
        self._positions: dict[str, str] = {}
        """Topic of the board -> the last message that was read."""
        self._counters: dict[str, _Posted] = {}
        self._notes: dict[tuple[str, str], WorkerMessage] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self._disconnect()

    async def read(self) -> LiveState | str:
        async with self._reading:
            if time.monotonic() - self._read_at >= FRESH_S:
                self._state = await self._read()
                self._read_at = time.monotonic()
            return self._state

    async def _read(self) -> LiveState | str:
        socket = urlsplit(self._config.redis_url)
        if not self._config.redis.url and not Path(socket.path).exists():
            return "its Redis is not running: what follows comes from its folder"
        try:
            if self._connected is None:
                await self._connect()
            return await self._read_all()
        except AsyncRLError as error:
            await self._disconnect()
            return f"its Redis cannot be read: {error}"

    async def _connect(self) -> None:
        async with AsyncExitStack() as opening:
            server = await opening.enter_async_context(open_server(self._config))
            redis = RunInRedis(server, self._config.run.name)
            self._buffer = opening.enter_context(open_buffer_on(server, self._config))
            self._board, self._inspection = RedisBoard(server, redis.name), Inspection(redis)
            self._connected = opening.pop_all()

    async def _disconnect(self) -> None:
        connected, self._connected = self._connected, None
        if connected is not None:
            await connected.aclose()

    async def _read_all(self) -> LiveState:
        held, run_state = await self._buffer.stats(), await self._inspection.run_state()
        limits, members = await self._buffer.limits(), await self._board.members_now()
        await self._read_messages()
        return LiveState(
            live_version=run_state.live_version,
            learner=run_state.learner,
            waits_for=waits_for(run_state, held),
            buffer=asdict(held),
            ages={max(0, held.version - version): count for version, count in sorted(held.ready_by_version.items())},
            limits={}
            if limits is None
            else {
                "slots": limits.slots,
                "max_slots": limits.max_slots,
                "max_age": limits.max_age,
                "groups_per_step": limits.groups_per_step,
            },
            workers=self._workers(members),
            notes=tuple(self._notes.values()),
        )

    async def _read_messages(self) -> None:
        """Read what workers posted since the last reading: counters, failures, blocked code."""
        for position, message in await self._new_messages(WORKER_METRICS, self._since(COUNTERS_S)):
            worker, counters = str(message.get("worker")), _numbers(message.get("counters"))
            self._counters[worker] = _Posted.after(self._counters.get(worker), _posted_at(position), counters)
        since = time.time() - COUNTERS_S
        self._counters = {worker: posted for worker, posted in self._counters.items() if posted.at >= since}
        for topic, kind in ((NOTES, WorkerNote), (BLOCKED, WorkerBlocked)):
            for _, message in await self._new_messages(topic, "0"):
                with suppress(ValidationError):
                    self._note(kind.model_validate(message))
        for key in list(self._notes)[:-NOTES_KEPT]:
            del self._notes[key]

    def _note(self, report: WorkerNote | WorkerBlocked) -> None:
        cause = report.cause if isinstance(report, WorkerNote) else report.place
        text = f"{report.cause}: {report.detail}" if isinstance(report, WorkerNote) else str(report)
        times = report.times if isinstance(report, WorkerNote) else 1
        self._notes.pop((report.worker, cause), None)  # so that the latest is the last
        self._notes[report.worker, cause] = WorkerMessage(
            worker=report.worker, environment=report.environment, text=text[:LONGEST_NOTE], times=times
        )

    async def _new_messages(self, topic: str, start: str) -> list[tuple[str, dict[str, Any]]]:
        found = await self._board.read(topic, self._positions.get(topic, start), 0.0)
        if found:
            self._positions[topic] = found[-1][0]
        return found

    def _since(self, seconds: float) -> str:
        return f"{max(0, round((time.time() - seconds) * 1000))}-0"

    def _workers(self, members: Sequence[Member]) -> tuple[WorkerState, ...]:
        """Those that are listed, without evaluators, and those that have posted lately but are gone."""
        listed = {member.id: member for member in members if not member.is_evaluator}
        return tuple(self._worker(name, listed.get(name)) for name in sorted({*listed, *self._counters}))

    def _worker(self, name: str, member: Member | None) -> WorkerState:
        posted = self._counters.get(name)
        known = member if member is not None else Member(id=name, host="", version=-1, device="")
        return WorkerState(
            id=name,
            is_listed=member is not None,
            host=known.host,
            device=known.device,
            version=known.version,
            catches_up=known.catches_up,
            seen_s=None if posted is None else max(0.0, time.time() - posted.at),
            tok_s=None if posted is None else posted.tok_s,
            counters={} if posted is None else posted.counters,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Posted:
    """A worker's counters, when it posted them, and its rate since the ones before."""

    at: float
    counters: dict[str, float]
    tok_s: float | None = None

    @classmethod
    def after(cls, before: _Posted | None, at: float, counters: dict[str, float]) -> _Posted:
        if before is None or at <= before.at:
            return cls(at=at, counters=counters)
        tokens = counters.get("tokens", 0.0) - before.counters.get("tokens", 0.0)
        return cls(at=at, counters=counters, tok_s=max(0.0, tokens) / (at - before.at))


def _numbers(counters: Any) -> dict[str, float]:
    found = cast("dict[str, Any]", counters) if isinstance(counters, dict) else {}
    return {name: float(value) for name, value in found.items() if isinstance(value, int | float)}


def _posted_at(position: str) -> float:
    """A message's position begins with the server's clock, in milliseconds."""
    return int(position.partition("-")[0]) / 1000
