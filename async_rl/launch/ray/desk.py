"""An actor over which other terminals ask a fleet to grow, shrink or drain."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from async_rl.errors import ConfigError
from async_rl.launch.ray.cluster import Actor, Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Have this many workers."""

    workers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainOne:
    """Let one worker finish its episodes and end; no other takes its place."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StopAll:
    """Drain everything: the learner writes a checkpoint, and the run can be resumed."""


FleetRequest = Scale | DrainOne | StopAll


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRow:
    """One process of a fleet, as `async-rl fleet ls` shows it."""

    name: str
    where: str


class Desk:
    """Hands requests to the fleet, in order, and its answers back, in any order.

    consumes: requests of `async-rl fleet`         waits for:    the next one; the fleet's answer
    produces: one sentence for each                unblocked by: `ask`; `answer`; end of the fleet
    """

    def __init__(self) -> None:
        self._requests: asyncio.Queue[tuple[FleetRequest, asyncio.Future[str]]] = asyncio.Queue(maxsize=64)
        self._unanswered: dict[int, asyncio.Future[str]] = {}
        self._last_number = 0
        self._rows: Sequence[ProcessRow] = ()

    async def ask(self, request: FleetRequest) -> str:
        """Return the fleet's answer, a sentence."""
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        await self._requests.put((request, answer))
        return await answer

    async def next_request(self) -> tuple[int, FleetRequest]:
        """Return the next request, and a number for its answer."""
        request, answer = await self._requests.get()
        self._last_number += 1
        self._unanswered[self._last_number] = answer
        return self._last_number, request

    async def answer(self, number: int, sentence: str) -> None:
        answer = self._unanswered.pop(number)
        if not answer.done():  # it is if the one who asked is gone
            answer.set_result(sentence)

    async def show(self, rows: Sequence[ProcessRow]) -> None:
        self._rows = rows

    async def rows(self) -> Sequence[ProcessRow]:
        return self._rows


def desk_name(run: str) -> str:
    return f"the fleet of run {run!r}"


def ask_fleet(cluster: Cluster, run: str, request: FleetRequest) -> str:
    """Ask the fleet of a run and return its answer. Raises ConfigError if the cluster has none."""
    return str(cluster.wait(_found(cluster, run).ask.remote(request)))


def fleet_rows(cluster: Cluster, run: str) -> Sequence[ProcessRow]:
    """The processes of a run's fleet. Raises ConfigError if the cluster has none."""
    return cluster.wait(_found(cluster, run).rows.remote())


def has_fleet(cluster: Cluster, run: str) -> bool:
    return cluster.find(desk_name(run)) is not None


def _found(cluster: Cluster, run: str) -> Actor:
    desk = cluster.find(desk_name(run))
    if desk is None:
        raise ConfigError(f"this Ray cluster does not have {desk_name(run)}; `async-rl launch ray` starts one")
    return desk
