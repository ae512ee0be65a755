"""`ReplayBuffer` over Redis: each state change is one atomic Lua script (scripts/), each wait a subscription.

Every script is idempotent, so a lost reply or a restarted server costs time and nothing else. All times are the server's.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict
from itertools import chain, count
from typing import Any, Literal, cast

from async_rl.errors import LearnerAlreadyRunning
from async_rl.payloads.codec import BadPayload, encode
from async_rl.replay_protocol import Audit, BufferStats, CommitResult, Drop, Limits
from async_rl.types import (
    BufferPosition,
    MixChange,
    OutstandingTicket,
    PendingTask,
    Recovery,
    RolloutGroup,
    SpentGroup,
    TakenGroup,
    Ticket,
    UndoneGroup,
    VersionRecord,
)
from buffer import keys, mix_log
from buffer.events import ticket_events
from buffer.payloads.files import PayloadFolder
from buffer.payloads.store import PayloadStore, decode_checked
from buffer.payloads.validation import problem_with
from buffer.rules.audit import audit
from buffer.rules.limits_text import read_limits, write_changes, write_limits
from buffer.rules.recovery import ENDED, outstanding_steps, verdicts_on
from buffer.run_in_redis import RunInRedis, ServerFull, chunks, rows
from buffer.server.client import Server, listen
from buffer.server.unexpected_replies import UnexpectedReply, reading, wrong_type
from buffer.stale_groups import find_stale
from buffer.stats_reply import parse_snapshot, parse_stats

VERSIONS_KEPT = 4096
"""Rows of the version table; older rows are deleted."""

log = logging.getLogger(__name__)


class RedisBuffer:
    """The replay buffer of one run, in a Redis server. async_rl/replay_protocol.py documents the methods."""

    def __init__(
        self,
        server: Server,
        run: str,
        *,
        learner_lease_s: float = 10.0,
        payload_folder: PayloadFolder | None = None,
        compress_text: bool = False,
    ) -> None:
        self._run = RunInRedis(server, run)
        self._payloads = PayloadStore(self._run, payload_folder)
        self._compress_text = compress_text
        self.vocab_size: int | None = None
        """If set, groups with token ids outside the vocabulary are quarantined."""
        self.on_stale: Callable[[TakenGroup], None] | None = None
        """Called with groups that `take` is about to drop as stale; not with all, if they are many."""
        self._learner_lease_ms = round(learner_lease_s * 1000)
        self._requests = (f"{uuid.uuid4().hex}-{number}" for number in count())
        self._published_version = self._released_step = -1
        """What this learner has published and released: a server that knows less has lost confirmed changes."""
        self._open_requests: dict[str, str] = {}
        """Worker -> id of its reservation that has returned no tickets yet."""

    # -- the worker's side ------------------------------------------------------------------------------------------
    async def reserve(self, worker: str, *, version: int, count: int, wait_s: float) -> list[Ticket]:
        if "\t" in worker:
            raise ValueError(f"a worker's name must not contain a tab: {worker!r}")
        # A cancelled call may have left a reply with tickets unread: the same request id returns the same tickets.
        request = self._open_requests.setdefault(worker, next(self._requests))

        async def attempt() -> list[Ticket]:
            try:
                reply = await self._run.run_script("reserve", worker, request, version, count, int(wait_s > 0))
            except ServerFull:
                return []
            return [
                Ticket(id=ticket.decode(), task_index=task, version=born, attempt=attempt, mix=mix.decode())
                for ticket, task, born, attempt, mix in rows(reply, 5)
            ]

        tickets = await self._run.until(attempt, f"on:slots:{worker}", wait_s)
        if tickets:
            del self._open_requests[worker]
            await self._payloads.check_folder()
        return tickets

    async def renew(self, worker: str, tickets: Sequence[str]) -> set[str]:
        if not tickets:
            return set()
        lost: list[bytes] = await self._run.run_script("renew", worker, *tickets)
        return {ticket.decode(errors="replace") for ticket in lost}

    async def commit(self, worker: str, group: RolloutGroup, *, keep: bool = True) -> CommitResult:
        if not keep:
            dropped = worker, group.id, "no_signal", group.task.environment, group.num_tokens
            return _commit_result(await self._run.run_script("drop", *dropped))
        problem, payload = problem_with(group, vocab_size=self.vocab_size), b""
        try:
            payload = encode(group, compress_text=self._compress_text)
        except BadPayload as error:
            problem = problem or str(error)
        if problem is not None:
            log.warning("group %s of worker %s is quarantined: %s", group.id, worker, problem)
            refused = worker, group.id, problem, group.task.environment, payload
            return _commit_result(await self._run.with_room(group.id, lambda: self._run.run_script("quarantine", *refused)))
        versions = group.oldest_version, group.newest_version
        described = worker, group.id, *versions, group.num_tokens, group.task.environment
        stored = await self._payloads.store(group.id, payload)

        async def store() -> bytes:
            return await self._run.run_script_with_payload("commit", group.id, stored, *described)

        return _commit_result(await self._run.with_room(group.id, store))

    async def abandon(self, worker: str, ticket: str, reason: Drop, *, tokens: int = 0) -> None:
        await self._run.run_script("drop", worker, ticket, reason, "", tokens)

    # -- the learner's side -----------------------------------------------------------------------------------------
    async def acquire(self, owner: str, limits: Limits, *, after: int = 0, succeeds: str = "") -> int:
        request = next(self._requests)
        first_seen: tuple[bytes, int] | None = None
        state = {**write_limits(limits), "folder": self._payloads.folder_token}  # workers write their payloads to that folder
        words = list(chain.from_iterable(state.items()))
        async with listen(self._run.server, self._run.key("on:learner")) as wait:
            while True:
                is_ours, *rest = await self._run.run_script(
                    "acquire", owner, request, self._learner_lease_ms, after, succeeds, *words
                )
                if is_ours:
                    self._published_version = self._released_step = -1
                    return rest[0]
                holder, renewals, incarnation, left_ms = rest
                if first_seen is not None and first_seen != (incarnation, renewals):
                    raise LearnerAlreadyRunning(
                        f"learner {holder.decode()} holds run {self._run.name}; stop it, or give this run another run.name"
                    )
                first_seen = (incarnation, renewals)
                await wait(left_ms / 1000 + 0.01)

    async def hold(self, fence: int) -> None:
        await self._run.run_script("hold", fence, self._learner_lease_ms)

    async def resign(self, fence: int) -> None:
        await self._run.run_script("resign", fence)

    async def recover(self, fence: int, position: BufferPosition | None, undone: Sequence[UndoneGroup] = ()) -> Recovery:
        """Recover in bounded chunks. If the learner dies between two of them, its successor starts over."""
        self._released_step = -1
        is_older = bool(await self._run.run_script("recover", fence, position.mark if position is not None else ""))
        outstanding = {ticket.number: ticket for ticket in position.outstanding} if position is not None else {}
        spent, returned, alive = 0, 0, set[str]()
        async for records in self._run.records():
            verdicts = dict(verdicts_on(records, position, outstanding, is_older=is_older))
            alive |= {ticket for ticket, verdict in verdicts.items() if verdict != ENDED}
            if verdicts:
                ended, ready = await self._run.run_script("settle", fence, *chain.from_iterable(verdicts.items()))
                spent, returned = spent + ended, returned + ready
        if is_older and position is not None:
            gone = [ticket for ticket in position.outstanding if keys.ticket_id(ticket.number) not in alive]
            lost = [ticket.again for ticket in gone if not ticket.steps]  # a group that has trained is not rolled out again
            for tasks in chunks([*position.redo, *lost]):
                await self._run.run_script("roll_again", fence, *(" ".join(map(str, task)) for task in tasks))
        lost_groups = 0
        for groups in chunks([] if is_older else undone):  # an older server follows the position alone
            lost_groups += await self._run.run_script("undo", fence, *chain.from_iterable(groups))
        saved = position if position is not None else BufferPosition(step=-1, version=-1, next_ticket=0, next_task=0)
        numbers = saved.step, saved.version, saved.next_ticket, saved.next_task, saved.untrained
        version = await self._run.run_script("recovered", fence, *numbers, saved.mark, *map(mix_log.write, saved.mix))
        return Recovery(version=version, returned=returned, spent=spent, lost=lost_groups)

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
            if self.on_stale is not None:
                for stale in await find_stale(self._run, self._payloads, version):
                    self.on_stale(stale)
            while reply := await self._run.run_script("take", fence, *wanted, self._published_version, self._released_step):
                groups, refused = await self._read_taken(reply)
                for ticket, reason in refused:
                    log.error("group %s cannot be used and is quarantined: %s", ticket, reason)
                    await self._run.run_script("refuse", fence, ticket, reason)
                if not refused:
                    return groups
            return []

        return await self._run.until(attempt, "on:ready", wait_s)

    async def _read_taken(self, reply: list[Any]) -> tuple[list[TakenGroup], list[tuple[str, str]]]:
        groups: list[TakenGroup] = []
        refused: list[tuple[str, str]] = []
        described = rows(reply, 6)
        payloads = await self._payloads.read([row[0].decode() for row in described])
        for (ticket, oldest, at_commit, at_take, task, attempt), payload in zip(described, payloads, strict=True):
            try:
                held = self._payloads.resolve(payload)
                group = decode_checked(held, ticket.decode(), oldest, vocab_size=self.vocab_size)
                if at_take < oldest:
                    raise BadPayload("its record says that it was taken before it was rolled out")
            except BadPayload as error:
                refused.append((ticket.decode(), str(error)))
            else:
                versions = {"version_at_commit": at_commit, "version_at_take": at_take}
                kept = held if held is not None else b""
                groups.append(TakenGroup(group=group, **versions, task_index=task, attempt=attempt, payload=kept))
        return groups, refused

    async def prioritize(self, fence: int, weights: Mapping[str, float]) -> None:
        for chunk in chunks([(ticket, repr(float(weight))) for ticket, weight in weights.items()]):
            await self._run.run_script("prioritize", fence, *chain.from_iterable(chunk))

    async def issue(self, fence: int, *, after: int) -> int:
        return await self._run.run_script("issue", fence, after)

    async def publish(self, fence: int, record: VersionRecord) -> None:
        await self._run.run_script("publish", fence, record.version, json.dumps(asdict(record)), VERSIONS_KEPT)
        self._published_version = max(self._published_version, record.version)

    async def release(self, fence: int, step: int) -> None:
        await self._run.run_script("release", fence, step)
        self._released_step = max(self._released_step, step)

    async def position(self, fence: int, step: int) -> BufferPosition:
        """Read the position in several calls. It is consistent although it is not a snapshot: tickets issued meanwhile are left
        out, and the tasks to roll again are read last, together with the mark. A server that has the mark is not older than
        this position.
        """
        mark = uuid.uuid4().hex[:16]
        version, next_ticket, next_task, mix = await self._run.run_script("position", fence, step)
        outstanding: dict[int, OutstandingTicket] = {}
        async for records in self._run.records():
            for ticket, record in records.items():
                number = keys.ticket_number(ticket)
                steps = outstanding_steps(record.state, record.steps, step)
                if number < next_ticket and steps is not None:
                    outstanding[number] = OutstandingTicket(number, record.task_index, record.attempt, record.failures, steps)
        untrained, waiting = await self._run.run_script("mark", fence, step, next_ticket, mark)
        with reading("redo"):
            redo = tuple(PendingTask(*map(int, task.split())) for task in waiting)
        again = {task.task_index for task in redo}
        return BufferPosition(
            step=step,
            version=version,
            next_ticket=next_ticket,
            next_task=next_task,
            untrained=untrained,
            redo=redo,
            outstanding=tuple(ticket for _, ticket in sorted(outstanding.items()) if ticket.task_index not in again),
            mix=tuple(map(mix_log.parse, mix)),
            mark=mark,
        )

    async def checkpoint(self, fence: int, step: int) -> None:
        while await self._run.run_script("checkpoint", fence, step):
            pass
        await self.sweep()

    async def spent_groups(self, limit: int) -> list[SpentGroup]:
        found: list[tuple[bytes, float]] = await self._run.run_command(
            "zrange", self._run.key("kept"), 0, limit - 1, withscores=True
        )
        with reading("kept"):
            kept = {ticket.decode(): int(step) for ticket, step in found}
        payloads = await self._payloads.read(list(kept))
        return [
            SpentGroup(id=ticket, step=step, payload=whole)
            for (ticket, step), payload in zip(kept.items(), payloads, strict=True)
            if (whole := self._payloads.to_bytes(payload, ticket)) is not None
        ]

    async def discard(self, fence: int, groups: Sequence[str]) -> None:
        for chunk in chunks(groups):
            await self._run.run_script("discard", fence, *chunk)
        await self.sweep()

    async def set_limit(self, fence: int, name: Literal["max_age", "pace"], value: float) -> None:
        await self._run.run_script("set_limit", fence, name, str(value))

    # -- any role ---------------------------------------------------------------------------------------------------
    async def limits(self) -> Limits | None:
        """Return the limits in force; None before the first learner."""
        state = await self._run.run_command("hgetall", self._run.key("state"))
        with reading("state"):
            return read_limits({name.decode(errors="replace"): value.decode() for name, value in state.items()})

    async def change_limits(self, changes: Mapping[str, Any]) -> None:
        await self._run.run_script("change_limits", *chain.from_iterable(write_changes(changes).items()))

    async def mix(self) -> tuple[MixChange, ...]:
        return tuple(map(mix_log.parse, await self._run.run_command("lrange", self._run.key("mix"), 0, -1)))

    async def change_mix(self, known: str, change: str) -> MixChange | None:
        entry = await self._run.run_script("change_mix", known, change)
        if entry == b"full":
            raise mix_log.full()
        return mix_log.parse(entry) if entry else None

    async def stats(self) -> BufferStats:
        return parse_stats(await self._run.run_script("stats", ""), await self.fence())

    async def fence(self) -> int:
        """Return the latest learner's fence; 0 before the first."""
        fence = await self._run.run_command("hget", self._run.key("learner"), "fence")
        with reading("learner"):
            return int(fence) if fence is not None else 0

    async def audit(self) -> Audit:
        try:
            await self.limits()  # can they be read?
            reply, fence = await self._run.run_script("stats", "everything"), await self.fence()
        except UnexpectedReply:
            await self._raise_if_types_are_wrong()
            raise
        return audit(parse_snapshot(reply, fence))

    async def _raise_if_types_are_wrong(self) -> None:
        """Raise UnexpectedReply naming a key of the wrong type: a script that meets one fails without saying which it is."""
        found = await self._run.run_commands([("type", self._run.key(name)) for name in keys.KINDS])
        for (name, wanted), kind in zip(keys.KINDS.items(), found, strict=True):
            if kind.decode() not in ("none", wanted):
                raise wrong_type(self._run.key(name), kind.decode(), wanted)

    def events(self) -> AbstractAsyncContextManager[AsyncIterator[tuple[str, str]]]:
        """Subscribe to changes of tickets: stored, taken, spent, dropped:REASON or quarantined, with the ticket."""
        return ticket_events(self._run)

    async def payload(self, ticket: str) -> bytes | None:
        """Return a group's payload, from Redis or its file; None if it has none."""
        [payload] = await self._payloads.read([ticket])
        return self._payloads.to_bytes(payload, ticket)

    async def sweep(self) -> int:
        """Delete the payload files that no ticket can refer to any more; returns how many. May be called at any time."""
        return await self._payloads.sweep()

    # -- quarantine -------------------------------------------------------------------------------------------------
    async def quarantined(self) -> list[Mapping[str, Any]]:
        """Return the reports on quarantined payloads, newest first."""
        found: dict[bytes, bytes] = await self._run.run_command("hgetall", self._run.key("quarantine"))
        reports = [_quarantine_report(ticket.decode(errors="replace"), text) for ticket, text in found.items()]
        return sorted(reports, key=lambda report: (report["time"], report["ticket"]), reverse=True)

    async def quarantined_payload(self, ticket: str) -> bytes | None:
        return self._payloads.to_bytes(
            await self._run.run_command("hget", self._run.key("quarantine_payloads"), ticket), ticket
        )

    async def readmit(self, ticket: str) -> str:
        """Make a quarantined group ready again. Returns "stored", or the reason why it stays in quarantine."""
        payload = await self._run.run_command("hget", self._run.key("quarantine_payloads"), ticket)
        try:
            group = decode_checked(self._payloads.resolve(payload), ticket)
        except BadPayload as error:
            return str(error)
        versions = group.oldest_version, group.newest_version
        return (await self._run.run_script("readmit", ticket, *versions, group.num_tokens, payload or b"")).decode()

    async def forget(self, tickets: Sequence[str]) -> int:
        """Delete quarantine reports with their payloads, and return how many reports there were."""
        return await self._run.run_script("forget", *tickets)


def _quarantine_report(ticket: str, text: bytes) -> dict[str, Any]:
    try:
        report: Any = json.loads(text)
        return {**report, "time": int(report["time"]), "ticket": ticket}
    except (ValueError, TypeError, LookupError, OverflowError):
        return {
            "ticket": ticket,
            "worker": "",
            "environment": "",
            "task": -1,
            "reason": "its report is unreadable",
            "time": 0,
            "size": 0,
        }


def _commit_result(reply: bytes) -> CommitResult:
    return cast("CommitResult", reply.decode())
