"""One run's keys in a Redis server: scripts that change them, plain reads, and waits on their channels."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar

from redis.exceptions import NoScriptError, OutOfMemoryError, ResponseError

from async_rl.durable.failpoints import define, failpoint
from async_rl.errors import FenceLost
from buffer import keys
from buffer.rules.recovery import rewound
from buffer.rules.ticket_record import TicketRecord, parse_record
from buffer.server.client import Server, listen
from buffer.server.scripts import NAMES, Script, load_script
from buffer.server.unexpected_replies import reading, refused

RECHECK_S = 1.0
"""A wait repeats its attempt this often: nothing announces the end of a lease, and a notification can be lost."""
TICKETS_AT_ONCE = 128
"""Tickets per call of a script, so that no script blocks the server for long."""

log = logging.getLogger(__name__)
define(*(f"{name}.{moment}" for name in NAMES for moment in ("before", "after")))
Argument = str | bytes | int | float
T = TypeVar("T")


class RunInRedis:
    """Runs scripts and commands on one run's keys.

    Refusals of Redis become FenceLost, ServerRewound, ServerFull or UnexpectedReply.
    """

    def __init__(self, server: Server, name: str) -> None:
        self.server = server
        self.name = name

    def key(self, name: str) -> str:
        return keys.key(self.name, name)

    async def run_script(self, name: str, *arguments: Argument, **chosen: str) -> Any:
        """Run a script of scripts/ and return its reply. `chosen` are the keys of keys.GIVEN that it touches."""
        script = load_script(name)
        declared = self.keys_of(script, chosen)

        async def run(redis: Any) -> Any:
            try:
                return await redis.evalsha(script.sha, len(declared), *declared, *arguments)
            except NoScriptError:  # the first call, or the server was restarted
                return await redis.eval(script.text, len(declared), *declared, *arguments)

        return await self._run(name, arguments, run)

    async def run_script_with_payload(self, name: str, ticket: str, payload: bytes, *arguments: Argument) -> Any:
        """Run a script in one transaction with a payload, which is stored before it if the ticket has none."""
        script = load_script(name)

        async def run(redis: Any) -> Any:
            pipeline = redis.pipeline(transaction=True)
            pipeline.hsetnx(self.key("payloads"), ticket, payload)
            # Sent as text: with an unknown SHA a restarted server would store the payload and fail the script.
            pipeline.eval(script.text, len(script.keys), *self.keys_of(script, {}), *arguments)
            _, reply = await pipeline.execute()
            return reply

        return await self._run(name, arguments, run)

    def keys_of(self, script: Script, chosen: Mapping[str, str]) -> list[str]:
        """Return the keys that a script declares, in its order."""
        return [chosen[name] if name in keys.GIVEN else self.key(name) for name in script.keys]

    async def _run(self, name: str, arguments: Sequence[Argument], run: Callable[[Any], Awaitable[Any]]) -> Any:
        failpoint(f"{name}.before")
        reply = await self.ask(name, run, arguments)
        failpoint(f"{name}.after")
        return reply

    async def run_command(self, command: str, *arguments: Any, **options: Any) -> Any:
        return await self.ask(command, lambda redis: getattr(redis, command)(*arguments, **options), arguments)

    async def run_commands(self, commands: Sequence[tuple[Any, ...]], *, at_once: bool = False) -> list[Any]:
        """Run commands in one round trip, `at_once` as one transaction."""

        async def execute(redis: Any) -> list[Any]:
            pipeline = redis.pipeline(transaction=at_once)
            for name, *arguments in commands:
                getattr(pipeline, name)(*arguments)
            return await pipeline.execute()

        return await self.ask(commands[0][0], execute) if commands else []

    async def ask(
        self, what: str, command: Callable[[Any], Awaitable[T]], arguments: Sequence[Any] = (), *, longer_s: float = 0.0
    ) -> T:
        """Call `command` with a client and return its reply; if that may take `longer_s`, with a connection for waiting."""
        redis = self.server.waits if longer_s else self.server.commands
        try:
            return await self.server.ask(lambda: command(redis), longer_s=longer_s)
        except ResponseError as error:
            raise _translated(error, what, arguments) from None

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
        async with listen(self.server, self.key("on:slots")) as wait:
            await wait(RECHECK_S)

    async def records(self) -> AsyncIterator[dict[str, TicketRecord]]:
        """Yield all records in chunks. A ticket that exists throughout comes at least once, perhaps several times."""
        async for found in self.unparsed_records(TICKETS_AT_ONCE):
            with reading("records"):
                records = {ticket.decode(): parse_record(text) for ticket, text in found.items()}
            for chunk in chunks(list(records.items())):  # Redis returns a small hash whole, whatever `count` says
                yield dict(chunk)

    async def unparsed_records(self, count: int) -> AsyncIterator[dict[bytes, bytes]]:
        cursor = 0
        while True:
            cursor, found = await self.run_command("hscan", self.key("records"), cursor, count=count)
            yield found
            if cursor == 0:
                return

    async def until(self, attempt: Callable[[], Awaitable[list[T]]], channel: str, wait_s: float) -> list[T]:
        """Repeat `attempt` at each notification until it returns something or `wait_s` is over; then return what it found."""
        found = await attempt()
        if found or wait_s <= 0:
            return found
        deadline = time.monotonic() + wait_s
        async with listen(self.server, self.key(channel)) as wait:
            while not (found := await attempt()) and (left := deadline - time.monotonic()) > 0:
                await wait(min(left, RECHECK_S))
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
