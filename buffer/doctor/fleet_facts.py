"""Asks a run's Redis which processes are there, what each has said of its machine, and how far its clock is from Redis'."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from async_rl.board.machines import MACHINES, MachineNote
from async_rl.config import Config
from async_rl.errors import AsyncRLError
from async_rl.telemetry import WORKER_METRICS
from buffer.board import RedisBoard
from buffer.doctor.redis_facts import hurried
from buffer.inspection import Inspection
from buffer.run_in_redis import RunInRedis
from buffer.server.client import open_server

LATEST_S = 2.0**40
"""No clock is beyond, in seconds since 1970."""
RECENT_MS = 5_000
"""Workers post their counters, with the time, once a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetProcess:
    name: str
    host: str
    """Empty: not known."""
    note: MachineNote | None
    """None: it has said nothing of its machine."""
    ahead_s: float | None = None
    """By how much its clock was ahead of that of Redis at its latest message; None: not known. The way of the message counts as
    behind."""
    is_evaluator: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetFacts:
    problem: str = ""
    """Why nothing can be said."""
    learner: FleetProcess | None = None
    members: tuple[FleetProcess, ...] = ()
    """Workers, and evaluators while they take weights."""

    @property
    def processes(self) -> list[FleetProcess]:
        return [*([self.learner] if self.learner is not None else []), *self.members]


async def gather_fleet(config: Config) -> FleetFacts:
    """Ask for rank 0 of the learner and the workers. Any user of the run may."""
    try:
        return await _gather(config)
    except AsyncRLError as error:
        return FleetFacts(problem=str(error))


async def _gather(config: Config) -> FleetFacts:
    async with open_server(hurried(config)) as server:
        redis = RunInRedis(server, config.run.name)
        board = RedisBoard(server, config.run.name)
        owner, members = (await Inspection(redis).run_state()).learner, await board.members_now()
        entries = await board.read(MACHINES, "0", 0.0)
        seconds, _ = await redis.run_command("time")
        recent = await board.read(WORKER_METRICS, f"{int(seconds) * 1000 - RECENT_MS}-0", 0.0)
    notes = dict(_notes(entries))
    ahead_s = {**_clocks("process", entries), **_clocks("worker", recent)}
    learner = notes.get(owner)
    return FleetFacts(
        learner=FleetProcess(
            name="the learner",
            host=learner.host if learner is not None else owner.rpartition(":")[0],
            note=learner,
            ahead_s=ahead_s.get(owner),
        )
        if owner
        else None,
        members=tuple(
            FleetProcess(
                name=each.id,
                host=each.host,
                note=notes.get(each.id),
                ahead_s=ahead_s.get(each.id),
                is_evaluator=each.is_evaluator,
            )
            for each in members
        ),
    )


def _notes(entries: list[tuple[str, dict[str, Any]]]) -> Iterator[tuple[str, MachineNote]]:
    for _, message in entries:
        try:
            note = MachineNote.model_validate(message)
        except ValidationError:  # another client wrote it, or another release
            continue
        yield note.process, note


def _clocks(key: str, entries: list[tuple[str, dict[str, Any]]]) -> Mapping[str, float]:
    """Process -> how far its clock is ahead, by the message that was fastest; `key` names the process in a message."""
    found: dict[str, float] = {}
    for position, message in entries:
        process, own_s = message.get(key), message.get("time")
        if isinstance(process, str) and isinstance(own_s, int | float) and 0 <= own_s < LATEST_S:  # any worker may write it
            ahead_s = own_s - int(position.partition("-")[0]) / 1000
            found[process] = max(ahead_s, found.get(process, ahead_s))
    return found
