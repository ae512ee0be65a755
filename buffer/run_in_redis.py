"""One run's keys in a Redis server: scripts that change them, plain reads, and waits on their channels."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar, cast

from redis.exceptions import OutOfMemoryError, ResponseError

from async_rl.durable.failpoints import define, failpoint
from async_rl.errors import FenceLost
from buffer import keys
from buffer.rules.recovery import rewound
from buffer.rules.ticket_record import TicketRecord, parse_record
from buffer.server.client import Server, listen
from buffer.server.scripts import NAMES, Argument, ScriptLibrary
from buffer.server.unexpected_replies import reading, refused

RECHECK_S = 1.0
"""A wait repeats its attempt this often: nothing announces the end of a lease, and a notification can be lost."""
TICKETS_AT_ONCE = 128
"""Tickets per call of a script, so that no script blocks the server for long."""

log = logging.getLogger(__name__)
define(*(f"{name}.{moment}" for name in NAMES for moment in ("before", "after")))
T = TypeVar("T")


class RunInRedis:
    """Runs scripts and commands on one run's keys.

    Refusals of Redis become FenceLost, ServerRewound, ServerFull or UnexpectedReply.
    """

    def __init__(self, server: Server, name: str) -> None:
        self.server = server
        self.name = name
        self._scripts = ScriptLibrary(server, name)

    def key(self, name: str) -> str:
        return keys.key(self.name, name)

    async def run_script(self, script: str, *arguments: Argument) -> Any:
        """Run a script of scripts/ and return its reply."""
        return await self._run(script, arguments, lambda: self._scripts.run(script, *arguments))

    async def run_script_with_payload(self, script: str, ticket: str, payload: bytes, *arguments: Argument) -> Any:
        """Run a script in one transaction with a payload, which is stored before it if the ticket has none."""
        place = self.key("payloads")
        return await self._run(
            script, arguments, lambda: self._scripts.run_with_payload(script, place, ticket, payload, *arguments)
        )

    async def _run(self, script: str, arguments: Sequence[Argument], run: Callable[[], Awaitable[Any]]) -> Any:
        failpoint(f"{script}.before")
        try:
            reply = await run()
        except ResponseError as error:
            raise _translated(error, script, arguments) from None
        failpoint(f"{script}.after")
        return reply

    async def run_command(self, command: str, *arguments: Any, **options: Any) -> Any:
        try:
            return await self.server.ask(lambda: getattr(self.server.commands, command)(*arguments, **options))
        except ResponseError as error:
            raise _translated(error, command, arguments) from None

    async def run_commands(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        async def execute() -> list[Any]:
            pipeline: Any = cast("Any", self.server.commands).pipeline(transaction=False)
            for name, *arguments in commands:
                getattr(pipeline, name)(*arguments)
            return await pipeline.execute()

        try:
            return await self.server.ask(execute) if commands else []
        except ResponseError as error:
            raise _translated(error, commands[0][0], ()) from None

    async def with_room(self, group: str, change: Callable[[], Awaitable[Any]]) -> Any:
        """Repeat `change` until the server has memory for it: a group is never dropped because Redis is full."""
        while True:
            try:
                return await change()
            except ServerFull:
                log.warning("the Redis server is full: group %s waits for a checkpoint to free memory", group)
            if not await self.run_script("starve"):  # 0: no kept payload was left to delete
                await self.wait_for_slots()

    async def wait_for_slots(self) -> None:
        async with listen(self.server, keys.slots_channel(self.name)) as listener:
            await listener.wait(RECHECK_S)

    async def records(self) -> AsyncIterator[dict[str, TicketRecord]]:
        """Yield all records in chunks. A ticket that exists throughout comes at least once, perhaps several times."""
        cursor = 0
        while True:
            cursor, found = await self.run_command("hscan", self.key("records"), cursor, count=TICKETS_AT_ONCE)
            with reading("records"):
                records = {ticket.decode(): parse_record(text) for ticket, text in found.items()}
            for chunk in chunks(list(records.items())):  # Redis returns a small hash whole, whatever `count` says
                yield dict(chunk)
            if int(cursor) == 0:
                return

    async def until(self, attempt: Callable[[], Awaitable[list[T]]], channel: str, wait_s: float) -> list[T]:
        """Repeat `attempt` at each notification until it returns something or `wait_s` is over; then return what it found."""
        found = await attempt()
        if found or wait_s <= 0:
            return found
        deadline = time.monotonic() + wait_s
        async with listen(self.server, channel) as listener:
            while not (found := await attempt()) and (left := deadline - time.monotonic()) > 0:
                await listener.wait(min(left, RECHECK_S))
        return found


class ServerFull(Exception):
    """maxmemory is reached; nothing was changed."""


def _translated(error: ResponseError, script: str, arguments: Sequence[Argument]) -> Exception:
    """Return the exception that stands for a refusal. Its text may quote a payload, so it is never passed on."""
    text = str(error)
    if text.startswith("FENCELOST"):
        return FenceLost(
            f"learner {arguments[0]!s} was replaced by learner {text.split()[1]} and may no longer change anything"
        )
    if text.startswith("REWOUND"):
        return rewound()
    if isinstance(error, OutOfMemoryError) or "OOM " in text[:200]:
        return ServerFull()
    return refused(script, error)


def chunks(elements: Sequence[T], length: int = TICKETS_AT_ONCE) -> Iterator[list[T]]:
    rest = iter(elements)
    while chunk := list(islice(rest, length)):
        yield chunk


def rows(flat: list[Any], width: int) -> list[tuple[Any, ...]]:
    """Split a flat reply into tuples of `width`."""
    return list(zip(*(flat[column::width] for column in range(width)), strict=True))
