"""The buffer's contract over Redis: one atomic script per change, and waiting without asking all the time.

Every script may be repeated, so a lost reply or a restarted server costs time and nothing else. All clocks are the
server's.
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import count
from typing import Any, Literal, TypeVar, cast

from redis.exceptions import OutOfMemoryError, ResponseError

from async_rl.errors import FenceLost, LearnerAlreadyRunning
from async_rl.protocols import Audit, BufferStats, CommitResult, Drop, Limits
from async_rl.types import (
    BufferPosition,
    OutstandingTicket,
    PendingTask,
    Recovery,
    RolloutGroup,
    TakenGroup,
    Ticket,
    VersionRecord,
)
from buffer import keys
from buffer.auditing import Snapshot, audit
from buffer.codec import BadPayload, decode, encode
from buffer.redis_client import Server, listen
from buffer.script_library import Argument, ScriptLibrary
from buffer.validation import problem_with

RECHECK_S = 1.0
"""Leases end without anybody telling, and a ring can be missed, so who waits looks again this often."""
PAYLOADS_AT_ONCE = 32
"""Groups per read: replies of some megabytes keep the server available to others in between."""
VERSIONS_KEPT = 4096
"""Rows of the version table."""
HEAD_BYTES = 256
"""Of a refused payload, kept with the report."""

NOTHING_SAVED = BufferPosition(step=-1, version=-1, next_ticket=0, next_task=0)

log = logging.getLogger(__name__)
T = TypeVar("T")


class RedisBuffer:
    """`ReplayBuffer` of one run, in a Redis server."""

    def __init__(self, server: Server, run: str, *, learner_lease_s: float = 10.0) -> None:
        self._server = server
        self._run = run
        self._learner_lease_ms = round(learner_lease_s * 1000)
        self._scripts = ScriptLibrary(server, keys.buffer_keys(run), prelude="prelude")
        self._requests = (f"{uuid.uuid4().hex}-{number}" for number in count())
        self._open_requests: dict[str, str] = {}
        """Reservations of workers that have not brought tickets yet."""

    # -- the worker's side ------------------------------------------------------------------------------------------
    async def reserve(self, worker: str, *, version: int, count: int, wait_s: float) -> list[Ticket]:
        # A reply that a cancelled call no longer awaited may have brought tickets: the same request brings them again.
        request = self._open_requests.setdefault(worker, next(self._requests))

        async def attempt() -> list[Ticket]:
            try:
                reply = await self._change("reserve", worker, request, version, count)
            except _ServerFull:
                return []
            return [
                Ticket(id=ticket.decode(), task_index=task, version=born, attempt=attempt)
                for ticket, task, born, attempt in _rows(reply, 4)
            ]

        tickets = await self._until(attempt, keys.slots_channel(self._run), wait_s)
        if tickets:
            del self._open_requests[worker]
        return tickets

    async def renew(self, worker: str, tickets: Sequence[str]) -> set[str]:
        if not tickets:
            return set()
        return _texts(await self._change("renew", worker, *tickets))

    async def commit(self, worker: str, group: RolloutGroup, *, keep: bool = True) -> CommitResult:
        if not keep:
            return _answer(await self._change("drop", worker, group.id, "no_signal"), instead_of_dropped="no_signal")
        try:
            problem = problem_with(group)
            payload = encode(group) if problem is None else b""
        except BadPayload as error:
            problem, payload = str(error), b""
        if problem is not None:
            log.warning("group %s of worker %s is quarantined: %s", group.id, worker, problem)
            return _answer(await self._change("quarantine", worker, group.id, problem, ""))
        return await self._store(worker, group, payload)

    async def _store(self, worker: str, group: RolloutGroup, payload: bytes) -> CommitResult:
        while True:
            try:
                versions = group.oldest_version, group.newest_version
                return _answer(await self._change("commit", worker, group.id, *versions, payload))
            except _ServerFull:
                log.warning("the Redis server is full: group %s waits for a checkpoint to free memory", group.id)
            async with listen(self._server, keys.slots_channel(self._run)) as bell:
                await bell.ring(RECHECK_S)

    async def abandon(self, worker: str, ticket: str, reason: Drop) -> None:
        await self._change("drop", worker, ticket, reason)

    # -- the learner's side -----------------------------------------------------------------------------------------
    async def acquire(self, owner: str, limits: Limits) -> int:
        request = next(self._requests)
        first_seen: tuple[bytes, int] | None = None
        async with listen(self._server, keys.learner_channel(self._run)) as bell:
            while True:
                is_ours, *rest = await self._change(
                    "acquire",
                    *(owner, request, self._learner_lease_ms, limits.max_age, limits.groups_per_step),
                    *(round(limits.lease_s * 1000), limits.max_attempts, limits.overtaken),
                )
                if is_ours:
                    return rest[0]
                holder, renewals, incarnation, left_ms = rest
                if first_seen is not None and first_seen != (incarnation, renewals):
                    raise LearnerAlreadyRunning(
                        f"learner {holder.decode()} holds run {self._run}; stop it, or give this run another run.name"
                    )
                first_seen = (incarnation, renewals)
                await bell.ring(left_ms / 1000 + 0.01)

    async def hold(self, fence: int) -> None:
        await self._change("hold", fence, self._learner_lease_ms)

    async def resign(self, fence: int) -> None:
        await self._change("resign", fence)

    async def recover(self, fence: int, position: BufferPosition | None) -> Recovery:
        saved = position if position is not None else NOTHING_SAVED
        redo = [" ".join(map(str, task)) for task in saved.redo]
        outstanding = [" ".join(map(str, ticket)) for ticket in saved.outstanding]
        counters = saved.step, saved.version, saved.next_ticket, saved.next_task
        version, returned, spent = await self._change("recover", fence, *counters, len(redo), *redo, *outstanding)
        return Recovery(version=version, returned=returned, spent=spent)

    async def take(
        self,
        fence: int,
        *,
        step: int,
        version: int,
        num_groups: int,
        wait_s: float,
        overtaken: Literal["wait", "drop"] | None = None,
    ) -> list[TakenGroup]:
        async def attempt() -> list[TakenGroup]:
            while reply := await self._change("take", fence, step, version, num_groups, overtaken or ""):
                groups, refused = await self._read(reply)
                for ticket, reason, head in refused:
                    log.error("group %s cannot be used and is quarantined: %s", ticket, reason)
                    await self._change("refuse", fence, ticket, reason, head)
                if not refused:
                    return groups
            return []

        return await self._until(attempt, keys.ready_channel(self._run), wait_s)

    async def _read(self, reply: list[Any]) -> tuple[list[TakenGroup], list[tuple[str, str, bytes]]]:
        groups: list[TakenGroup] = []
        refused: list[tuple[str, str, bytes]] = []
        rows = _rows(reply, 4)
        payloads = await self._payloads([row[0] for row in rows])
        for (ticket, oldest, version_at_commit, version_at_take), payload in zip(rows, payloads, strict=True):
            try:
                group = _checked(payload, ticket.decode(), oldest)
            except BadPayload as error:
                refused.append((ticket.decode(), str(error), (payload or b"")[:HEAD_BYTES].hex().encode()))
            else:
                groups.append(TakenGroup(group=group, version_at_commit=version_at_commit, version_at_take=version_at_take))
        return groups, refused

    async def _payloads(self, tickets: Sequence[bytes]) -> list[bytes | None]:
        async def fetch() -> list[list[bytes | None]]:
            pipeline: Any = cast("Any", self._server.commands).pipeline(transaction=False)
            for start in range(0, len(tickets), PAYLOADS_AT_ONCE):
                pipeline.hmget(keys.payloads(self._run), tickets[start : start + PAYLOADS_AT_ONCE])
            return await pipeline.execute()

        replies = await self._server.ask(fetch)
        return [payload for reply in replies for payload in reply]

    async def issue(self, fence: int) -> int:
        return await self._change("issue", fence)

    async def publish(self, fence: int, record: VersionRecord) -> None:
        await self._change("publish", fence, record.version, json.dumps(asdict(record)), VERSIONS_KEPT)

    async def release(self, fence: int, step: int) -> None:
        await self._change("release", fence, step)

    async def position(self, fence: int, step: int) -> BufferPosition:
        version, next_ticket, next_task, redo, outstanding = await self._change("position", fence, step)
        return BufferPosition(
            step=step,
            version=version,
            next_ticket=next_ticket,
            next_task=next_task,
            redo=tuple(PendingTask(*map(int, task.split())) for task in redo),
            outstanding=tuple(sorted(OutstandingTicket(*map(int, ticket.split())) for ticket in outstanding)),
        )

    async def checkpoint(self, fence: int, step: int) -> None:
        await self._change("checkpoint", fence, step)

    # -- anybody ----------------------------------------------------------------------------------------------------
    async def stats(self) -> BufferStats:
        return _stats(await self._change("stats", ""))

    async def audit(self) -> Audit:
        reply = await self._change("stats", "everything")
        leased, reserved, ready, taken, recorded, payloads = reply[-6:]
        return audit(
            Snapshot(
                stats=_stats(reply),
                leased=_texts(leased),
                reserved=_texts(reserved),
                ready=_texts(ready),
                taken=_texts(taken),
                recorded=_texts(recorded),
                payloads={ticket.decode(): size for ticket, size in _rows(payloads, 2)},
            )
        )

    async def quarantined(self) -> list[Mapping[str, Any]]:
        """The latest reports on refused payloads, newest first."""
        redis = cast("Any", self._server.commands)
        reports = await self._server.ask(lambda: redis.lrange(keys.quarantine(self._run), 0, -1))
        return [json.loads(report) for report in reports]

    # -- talking to the server --------------------------------------------------------------------------------------
    async def _change(self, script: str, *arguments: Argument) -> Any:
        try:
            return await self._scripts.run(script, *arguments)
        except ResponseError as error:
            raise _translated(error, arguments) from error

    async def _until(self, attempt: Callable[[], Awaitable[list[T]]], channel: str, wait_s: float) -> list[T]:
        found = await attempt()
        if found or wait_s <= 0:
            return found
        deadline = time.monotonic() + wait_s
        async with listen(self._server, channel) as bell:
            while not (found := await attempt()) and (left := deadline - time.monotonic()) > 0:
                await bell.ring(min(left, RECHECK_S))
        return found


class _ServerFull(Exception):
    """maxmemory is reached: nothing was changed."""


def _translated(error: ResponseError, arguments: Sequence[Argument]) -> Exception:
    """What the server's refusal means. Its text may quote a payload, so it is never passed on."""
    text = str(error)
    if text.startswith("FENCELOST"):
        current = text.split()[1]
        return FenceLost(f"learner {arguments[0]!s} was replaced by learner {current} and may change nothing any more")
    if isinstance(error, OutOfMemoryError) or "OOM " in text[:200]:
        return _ServerFull()
    return error


def _checked(payload: bytes | None, ticket: str, oldest_version: int) -> RolloutGroup:
    """The group in a payload that somebody else may have written."""
    if payload is None:
        raise BadPayload("its payload is gone")
    group = decode(payload)
    if problem := problem_with(group):
        raise BadPayload(problem)
    if group.id != ticket:
        raise BadPayload("it carries the id of another ticket")
    if group.oldest_version != oldest_version:
        raise BadPayload("its oldest version is not the one that was committed")
    return group


def _answer(reply: bytes, *, instead_of_dropped: CommitResult = "lease_lost") -> CommitResult:
    text = reply.decode()
    return instead_of_dropped if text == "dropped" else cast("CommitResult", text)


def _rows(flat: list[Any], width: int) -> list[tuple[Any, ...]]:
    return list(zip(*(flat[column::width] for column in range(width)), strict=True))


def _texts(reply: list[bytes]) -> set[str]:
    return {text.decode() for text in reply}


def _stats(reply: list[Any]) -> BufferStats:
    reserved, ready, taken, spent, quarantined, issued, slots, slots_used, version, fence, size, dropped, versions = reply[:13]
    return BufferStats(
        reserved=reserved,
        ready=ready,
        taken=taken,
        spent=spent,
        dropped={reason.decode(): int(number) for reason, number in _rows(dropped, 2)},
        quarantined=quarantined,
        issued=issued,
        slots=slots,
        slots_used=slots_used,
        version=version,
        fence=fence,
        bytes=size,
        ready_by_version=dict(Counter(cast("list[int]", versions))),
    )
