"""The buffer's contract over Redis: one atomic script per change, and waiting without asking all the time.

Every script may be repeated, so a lost reply or a restarted server costs time and nothing else. All clocks are the
server's.
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import count, islice
from typing import Any, TypeVar, cast

from redis.exceptions import OutOfMemoryError, ResponseError

from async_rl.errors import AsyncRLError, FenceLost, FleetMismatch, LearnerAlreadyRunning
from async_rl.failpoints import define, failpoint
from async_rl.protocols import Audit, BufferStats, CommitResult, Drop, Limits
from async_rl.types import (
    BufferPosition,
    OutstandingTicket,
    PendingTask,
    Recovery,
    RolloutGroup,
    SpentGroup,
    TakenGroup,
    Ticket,
    VersionRecord,
)
from buffer import keys
from buffer.arena import WORTH_A_FILE, Arena, ArenaFull, is_reference
from buffer.auditing import Snapshot, audit
from buffer.codec import BadPayload, decode, encode
from buffer.limits_text import read_limits, write_changes, write_limits
from buffer.memory_ledger import rewound, surviving_steps
from buffer.records import Record, parse
from buffer.redis_client import Server, listen
from buffer.script_library import NAMES, Argument, ScriptLibrary
from buffer.validation import problem_with

RECHECK_S = 1.0
"""Leases end without anybody telling, and a ring can be missed, so who waits looks again this often."""
PAYLOADS_AT_ONCE = 32
"""Groups per read: replies of some megabytes keep the server available to others in between."""
TICKETS_AT_ONCE = 128
"""Per call of a script: no script keeps the server to itself for long."""
VERSIONS_KEPT = 4096
"""Rows of the version table."""

log = logging.getLogger(__name__)
define(*(f"{name}.{moment}" for name in NAMES for moment in ("before", "after")))
T = TypeVar("T")


class RedisBuffer:
    """`ReplayBuffer` of one run, in a Redis server."""

    def __init__(self, server: Server, run: str, *, learner_lease_s: float = 10.0, arena: Arena | None = None) -> None:
        self._server = server
        self._run = run
        self._arena = arena
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
                reply = await self._change("reserve", _name(worker), request, version, count, int(wait_s > 0))
            except _ServerFull:
                return []
            return [
                Ticket(id=ticket.decode(), task_index=task, version=born, attempt=attempt)
                for ticket, task, born, attempt in _rows(reply, 4)
            ]

        tickets = await self._until(attempt, keys.slots_channel(self._run), wait_s)
        if tickets:
            del self._open_requests[worker]
            await self._share_folder()
        return tickets

    async def renew(self, worker: str, tickets: Sequence[str]) -> set[str]:
        if not tickets:
            return set()
        return _texts(await self._change("renew", worker, *tickets))

    async def commit(self, worker: str, group: RolloutGroup, *, keep: bool = True) -> CommitResult:
        if not keep:
            result = await self._change("drop", worker, group.id, "no_signal", group.task.environment)
            return _answer(result, instead_of_dropped="no_signal")
        problem, payload = problem_with(group), b""
        try:
            payload = encode(group)
        except (BadPayload, OverflowError, TypeError, ValueError) as error:
            problem = problem or str(error)
        if problem is not None:
            log.warning("group %s of worker %s is quarantined: %s", group.id, worker, problem)
            refused = worker, group.id, problem, group.task.environment, payload
            return _answer(await self._with_room(group.id, "quarantine", *refused))
        versions = group.oldest_version, group.newest_version
        stored = worker, group.id, *versions, group.num_tokens, group.task.environment
        return _answer(await self._with_room(group.id, "commit", *stored, await self._beside(group.id, payload)))

    async def _with_room(self, group: str, script: str, *arguments: Argument) -> Any:
        """Wait as long as the server is full: what was rolled out is never thrown away for want of memory."""
        while True:
            try:
                return await self._change(script, *arguments)
            except _ServerFull:
                log.warning("the Redis server is full: group %s waits for a checkpoint to free memory", group)
            if await self._change("starve"):
                continue  # kept payloads made room
            async with listen(self._server, keys.slots_channel(self._run)) as bell:
                await bell.ring(RECHECK_S)

    async def _beside(self, group: str, payload: bytes) -> bytes:
        """What Redis is to hold: the payload, or a reference to the file that holds it."""
        if self._arena is None or len(payload) < WORTH_A_FILE:
            return payload
        while True:
            try:
                return self._arena.put(group, payload)
            except ArenaFull:
                log.warning("%s is full: group %s waits for a checkpoint to free room", self._arena.folder, group)
            kept_made_room = await self._change("starve")
            if await self.sweep() or kept_made_room:
                continue
            async with listen(self._server, keys.slots_channel(self._run)) as bell:
                await bell.ring(RECHECK_S)

    async def _share_folder(self) -> None:
        """Tickets exist because a learner lives, and it has said in which folder it looks."""
        if self._arena is not None and await self._ask("hget", keys.state(self._run), "folder") != self._arena.token:
            raise FleetMismatch(
                f"redis.payloads: the learner does not see this machine's {self._arena.folder}; set it to redis for this worker"
            )

    async def abandon(self, worker: str, ticket: str, reason: Drop, *, environment: str = "") -> None:
        await self._change("drop", worker, ticket, reason, environment)

    # -- the learner's side -----------------------------------------------------------------------------------------
    async def acquire(self, owner: str, limits: Limits) -> int:
        request = next(self._requests)
        first_seen: tuple[bytes, int] | None = None
        words = [word for pair in write_limits(limits).items() for word in pair]
        async with listen(self._server, keys.learner_channel(self._run)) as bell:
            while True:
                is_ours, *rest = await self._change("acquire", owner, request, self._learner_lease_ms, *words)
                if is_ours:
                    await self._change("claim_folder", rest[0], self._arena.token if self._arena is not None else "")
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
        """In bounded pieces: a learner that dies between them is succeeded by one that begins again."""
        next_ticket = position.next_ticket if position is not None else 0
        is_older = await self._change("recover", fence, next_ticket)
        spent, returned, alive = 0, 0, set[str]()
        async for records in self._records():
            alive |= records.keys()
            verdicts = [word for pair in _verdicts(records, position) for word in pair]
            if verdicts:
                ended, ready = await self._change("settle", fence, *verdicts)
                spent, returned = spent + ended, returned + ready
        if is_older and position is not None:
            lost = [ticket.again for ticket in position.outstanding if keys.ticket_id(ticket.number) not in alive]
            for tasks in _pieces([*position.redo, *lost]):
                await self._change("roll_again", fence, *(" ".join(map(str, task)) for task in tasks))
        saved = position if position is not None else BufferPosition(step=-1, version=-1, next_ticket=0, next_task=0)
        version = await self._change("recovered", fence, saved.step, saved.version, saved.next_ticket, saved.next_task)
        return Recovery(version=version, returned=returned, spent=spent)

    async def take(
        self,
        fence: int,
        *,
        step: int,
        version: int,
        num_groups: int,
        wait_s: float,
        max_tokens: int | None = None,
        patient: bool = True,
    ) -> list[TakenGroup]:
        wanted = step, version, num_groups, max_tokens if max_tokens is not None else 0, int(patient)

        async def attempt() -> list[TakenGroup]:
            while reply := await self._change("take", fence, *wanted):
                groups, refused = await self._read(reply)
                for ticket, reason in refused:
                    log.error("group %s cannot be used and is quarantined: %s", ticket, reason)
                    await self._change("refuse", fence, ticket, reason)
                if not refused:
                    return groups
            return []

        return await self._until(attempt, keys.ready_channel(self._run), wait_s)

    async def _read(self, reply: list[Any]) -> tuple[list[TakenGroup], list[tuple[str, str]]]:
        groups: list[TakenGroup] = []
        refused: list[tuple[str, str]] = []
        rows = _rows(reply, 4)
        payloads = await self._payloads([row[0].decode() for row in rows])
        for (ticket, oldest, version_at_commit, version_at_take), payload in zip(rows, payloads, strict=True):
            try:
                group = _checked(self._whole(payload), ticket.decode(), oldest)
            except BadPayload as error:
                refused.append((ticket.decode(), str(error)))
            else:
                groups.append(TakenGroup(group=group, version_at_commit=version_at_commit, version_at_take=version_at_take))
        return groups, refused

    async def _payloads(self, tickets: Sequence[str]) -> list[bytes | None]:
        async def fetch() -> list[list[bytes | None]]:
            pipeline: Any = cast("Any", self._server.commands).pipeline(transaction=False)
            for some in _pieces(tickets, PAYLOADS_AT_ONCE):
                pipeline.hmget(keys.payloads(self._run), some)
            return await pipeline.execute()

        replies = await self._server.ask(fetch) if tickets else []
        return [payload for reply in replies for payload in reply]

    def _whole(self, payload: bytes | None) -> bytes | memoryview | None:
        if payload is None or not is_reference(payload):
            return payload
        if self._arena is None:
            raise BadPayload("its bytes are in a folder beside Redis, and redis.payloads names none here")
        return self._arena.get(payload)

    def _copy(self, payload: bytes | None, ticket: str) -> bytes | None:
        try:
            whole = self._whole(payload)
        except BadPayload as error:
            log.warning("group %s cannot be read: %s", ticket, error)
            return None
        return bytes(whole) if whole is not None else None

    async def prioritize(self, fence: int, weights: Mapping[str, float]) -> None:
        for some in _pieces(list(weights.items())):
            await self._change(
                "prioritize", fence, *(word for ticket, weight in some for word in (ticket, repr(float(weight))))
            )

    async def issue(self, fence: int, *, after: int) -> int:
        return await self._change("issue", fence, after)

    async def publish(self, fence: int, record: VersionRecord) -> None:
        await self._change("publish", fence, record.version, json.dumps(asdict(record)), VERSIONS_KEPT)

    async def release(self, fence: int, step: int) -> None:
        await self._change("release", fence, step)

    async def position(self, fence: int, step: int) -> BufferPosition:
        """Not one moment's picture, but a sound one: tickets issued meanwhile are left out, and a task that goes back to the
        list meanwhile stands in it, because that is read last.
        """
        version, next_ticket, next_task = await self._change("position", fence)
        outstanding: dict[int, OutstandingTicket] = {}
        async for records in self._records():
            for ticket, record in records.items():
                number = keys.ticket_number(ticket)
                if number < next_ticket and _is_outstanding(record, step):
                    outstanding[number] = OutstandingTicket(
                        number, record.task_index, record.attempt, record.failures, _until_step(record, step)
                    )
        redo = [PendingTask(*map(int, task.split())) for task in await self._ask("lrange", keys.redo(self._run), 0, -1)]
        again = set(redo)
        return BufferPosition(
            step=step,
            version=version,
            next_ticket=next_ticket,
            next_task=next_task,
            redo=tuple(redo),
            outstanding=tuple(ticket for _, ticket in sorted(outstanding.items()) if ticket.again not in again),
        )

    async def checkpoint(self, fence: int, step: int) -> None:
        while await self._change("checkpoint", fence, step):
            pass
        await self.sweep()

    async def spent_groups(self, limit: int) -> list[SpentGroup]:
        kept: list[tuple[bytes, float]] = await self._ask("zrange", keys.kept(self._run), 0, limit - 1, withscores=True)
        payloads = await self._payloads([ticket.decode() for ticket, _ in kept])
        return [
            SpentGroup(id=ticket.decode(), step=int(step), payload=whole)
            for (ticket, step), payload in zip(kept, payloads, strict=True)
            if (whole := self._copy(payload, ticket.decode())) is not None
        ]

    async def discard(self, fence: int, groups: Sequence[str]) -> None:
        for some in _pieces(groups):
            await self._change("discard", fence, *some)
        await self.sweep()

    async def sweep(self) -> int:
        """Delete the payload files that nobody needs any more; returns how many. Anybody may, at any time."""
        if self._arena is None:
            return 0
        swept = 0
        for some in _pieces(self._arena.names()):
            unwanted = await self._change("unwanted", *some)
            self._arena.delete(name.decode() for name in unwanted)
            swept += len(unwanted)
        return swept

    # -- anybody ----------------------------------------------------------------------------------------------------
    async def limits(self) -> Limits | None:
        """Those in force; None before the first learner."""
        return read_limits({name.decode(): value.decode() for name, value in (await self._state()).items()})

    async def overrides(self) -> dict[str, str]:
        """What was changed while the run goes on, as it stands in Redis."""
        found = await self._ask("hgetall", keys.overrides(self._run))
        return {name.decode(): value.decode() for name, value in found.items()}

    async def change_limits(self, changes: Mapping[str, int | float | str]) -> None:
        await self._change("change_limits", *(word for pair in write_changes(changes).items() for word in pair))

    async def _state(self) -> dict[bytes, bytes]:
        return await self._ask("hgetall", keys.state(self._run))

    async def stats(self) -> BufferStats:
        return _stats(await self._change("stats", ""))

    async def audit(self) -> Audit:
        reply = await self._change("stats", "everything")
        leased, reserved, ready, again, taken, kept, drawn, recorded = (_texts(tickets) for tickets in reply[-9:-1])
        return audit(
            Snapshot(
                stats=_stats(reply[:-9]),
                leased=leased,
                reserved=reserved,
                ready=ready,
                again=again,
                taken=taken,
                kept=kept,
                drawn=drawn,
                recorded=recorded,
                payloads={ticket.decode(errors="replace"): size for ticket, size in _rows(reply[-1], 2)},
            )
        )

    # -- quarantine -------------------------------------------------------------------------------------------------
    async def quarantined(self) -> list[Mapping[str, Any]]:
        """The latest reports on refused payloads, newest first."""
        reports = [json.loads(report) for report in await self._ask("hvals", keys.quarantine(self._run))]
        return sorted(reports, key=lambda report: (report["time"], report["ticket"]), reverse=True)

    async def quarantined_payload(self, ticket: str) -> bytes | None:
        return self._copy(await self._ask("hget", keys.quarantine_payloads(self._run), ticket), ticket)

    async def readmit(self, ticket: str) -> str:
        """ "stored", or why the group stays in quarantine."""
        payload = await self._ask("hget", keys.quarantine_payloads(self._run), ticket)
        try:
            group = _checked(self._whole(payload), ticket)
        except BadPayload as error:
            return str(error)
        versions = group.oldest_version, group.newest_version
        return (await self._change("readmit", ticket, *versions, group.num_tokens, payload or b"")).decode()

    async def forget(self, tickets: Sequence[str]) -> int:
        """Delete reports and payloads; returns how many there were."""
        return await self._change("forget", *tickets)

    # -- talking to the server --------------------------------------------------------------------------------------
    async def _change(self, script: str, *arguments: Argument) -> Any:
        failpoint(f"{script}.before")
        try:
            reply = await self._scripts.run(script, *arguments)
        except ResponseError as error:
            raise _translated(error, script, arguments) from None
        failpoint(f"{script}.after")
        return reply

    async def _ask(self, command: str, *arguments: Any, **options: Any) -> Any:
        try:
            return await self._server.ask(lambda: getattr(self._server.commands, command)(*arguments, **options))
        except ResponseError as error:
            raise _translated(error, command, arguments) from None

    async def _records(self) -> AsyncIterator[dict[str, Record]]:
        """Every ticket that is there from the beginning to the end, some at a time, perhaps more than once."""
        cursor = 0
        while True:
            cursor, found = await self._ask("hscan", keys.records(self._run), cursor, count=TICKETS_AT_ONCE)
            records = {ticket.decode(): parse(text) for ticket, text in found.items()}
            for some in _pieces(list(records.items())):  # a small hash comes as a whole, whatever was asked for
                yield dict(some)
            if int(cursor) == 0:
                return

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


class UnexpectedReply(AsyncRLError):
    """The server refused a change for a reason that is not ours."""


def _translated(error: ResponseError, script: str, arguments: Sequence[Argument]) -> Exception:
    """What the server's refusal means. Its text may quote a payload, so it is never passed on."""
    text = str(error)
    if text.startswith("FENCELOST"):
        return FenceLost(f"learner {arguments[0]!s} was replaced by learner {text.split()[1]} and may change nothing any more")
    if text.startswith("REWOUND"):
        return rewound()
    if isinstance(error, OutOfMemoryError) or "OOM " in text[:200]:
        return _ServerFull()
    kind = text.split(" ", 1)[0][:40]
    return UnexpectedReply(
        f"Redis refused {script!r} ({kind if kind.isalpha() else 'an error'}): has somebody else written to this run's keys? "
        "`async-rl buffer audit` tells what does not belong"
    )


def _checked(payload: bytes | memoryview | None, ticket: str, oldest_version: int | None = None) -> RolloutGroup:
    """The group in a payload that somebody else may have written."""
    if payload is None:
        raise BadPayload("its payload is gone")
    group = decode(payload)
    if problem := problem_with(group):
        raise BadPayload(problem)
    if group.id != ticket:
        raise BadPayload("it carries the id of another ticket")
    if oldest_version is not None and group.oldest_version != oldest_version:
        raise BadPayload("its oldest version is not the one that was committed")
    return group


def _verdicts(records: Mapping[str, Record], position: BufferPosition | None) -> Iterator[tuple[str, str]]:
    """What recovery makes of each ticket: see scripts/settle.lua."""
    outstanding = {ticket.number: ticket for ticket in position.outstanding} if position is not None else {}
    for ticket, record in records.items():
        if record.state == "kept":
            continue
        number = keys.ticket_number(ticket)
        steps = surviving_steps(number, record.state, record.steps, position, outstanding)
        yield ticket, "ended" if steps is None else ",".join(map(str, steps)) or "-"


def _is_outstanding(record: Record, step: int) -> bool:
    return record.state != "kept" and (record.state != "taken" or record.steps[-1] > step)


def _until_step(record: Record, step: int) -> tuple[int, ...]:
    return tuple(used for used in record.steps if used <= step)


def _answer(reply: bytes, *, instead_of_dropped: CommitResult = "lease_lost") -> CommitResult:
    text = reply.decode()
    return instead_of_dropped if text == "dropped" else cast("CommitResult", text)


def _name(worker: str) -> str:
    if "\t" in worker:
        raise ValueError(f"the name of a worker holds no tab: {worker!r}")
    return worker


def _pieces(elements: Sequence[T], length: int = TICKETS_AT_ONCE) -> Iterator[list[T]]:
    rest = iter(elements)
    while some := list(islice(rest, length)):
        yield some


def _rows(flat: list[Any], width: int) -> list[tuple[Any, ...]]:
    return list(zip(*(flat[column::width] for column in range(width)), strict=True))


def _texts(reply: list[bytes]) -> set[str]:
    return {text.decode(errors="replace") for text in reply}


def _stats(reply: list[Any]) -> BufferStats:
    said: dict[str, Any] = {name.decode(): value for name, value in _rows(reply, 2)}
    return BufferStats(
        **{
            name: said[name]
            for name in ("reserved", "ready", "again", "taken", "kept", "spent", "quarantined", "issued", "expired")
        },
        **{name: said[name] for name in ("slots", "slots_used", "version", "fence", "bytes")},
        owed=float(said["owed"]),
        starving=said["starving"] == 1,
        dropped={reason.decode(): int(number) for reason, number in _rows(said["dropped"], 2)},
        ready_by_version=dict(_rows(said["ready_by_version"], 2)),
    )
