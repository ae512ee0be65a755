"""A rollout worker without rollouts: real reservations, renewals and commits, with every outcome of a group."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from random import Random

import numpy as np

from async_rl.durable.failpoints import define, failpoint
from async_rl.protocols import Board
from async_rl.replay_protocol import ReplayBuffer
from async_rl.types import Rollout, RolloutGroup, Sample, Status, Task, Ticket, spans_of
from tests.chaos.stage import Stage, stop_event

define("writer.reserved", "writer.answered")

IN_FLIGHT = 4
ENDINGS = {"commit": 78, "twice": 6, "no_signal": 4, "failed": 3, "abandoned": 3, "unsound": 3, "silent": 3}


class Writer:
    def __init__(self, stage: Stage, buffer: ReplayBuffer, board: Board) -> None:
        self._stage, self._journal = stage, stage.journal
        self._buffer, self._board = buffer, board
        self._random = stage.random
        # Real workers have a new name in every life; reusing the old name is harder on the buffer.
        self._name = stage.role if self._random.random() < 0.5 else f"{stage.role}-{stage.life}"
        self._live = -1
        self._in_flight: set[str] = set()
        self._reserving = asyncio.Lock()
        """One reservation at a time, as in a real worker."""

    async def run(self, stop: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as tasks:
            renewing = tasks.create_task(self._renew(), name="renew")
            async with asyncio.TaskGroup() as flights:
                for number in range(IN_FLIGHT):
                    random = Random(self._random.random())
                    flights.create_task(self._fly(stop, random), name=f"flight {number}")
            renewing.cancel()

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._stage.plan.settings.ticket_lease_s / 4)
            self._in_flight -= await self._buffer.renew(self._name, list(self._in_flight))

    async def _fly(self, stop: asyncio.Event, random: Random) -> None:
        """consumes: tickets     waits for:    slots, a live version
        produces: groups      unblocked by: the learner, `stop`
        """
        while not stop.is_set():
            for ticket in await self._reserve(random.choice((1, 1, 2))):
                await self._work(ticket, random)

    async def _reserve(self, count: int) -> list[Ticket]:
        async with self._reserving:
            version = await self._look()
            self._stage.set_state("reserving")
            tickets = await self._buffer.reserve(self._name, version=version, count=count, wait_s=0.2)
        for ticket in tickets:
            facts = {"task": ticket.task_index, "attempt": ticket.attempt, "version": ticket.version}
            self._journal.add("reserved", ticket=ticket.id, worker=self._name, **facts)
        self._in_flight |= {ticket.id for ticket in tickets}
        if tickets:
            failpoint("writer.reserved")
        return tickets

    async def _look(self) -> int:
        record = await self._board.live_version()
        version = -1 if record is None else record.version
        if version != self._live:
            self._live = version
            self._journal.add("live", version=version)
        return version

    async def _work(self, ticket: Ticket, random: Random) -> None:
        self._stage.set_state("rolling")
        await asyncio.sleep(random.choice((0, 0, 0.005, 0.01, 0.03, 0.3)))
        [ending] = random.choices(tuple(ENDINGS), tuple(ENDINGS.values()))
        if ending != "silent":
            await self._end(ticket, ending, random)
        self._in_flight.discard(ticket.id)

    async def _end(self, ticket: Ticket, ending: str, random: Random) -> None:
        self._stage.set_state(f"ending: {ending}")
        self._journal.add("ends", ticket=ticket.id, task=ticket.task_index, how=ending)
        if ending in ("failed", "abandoned"):
            await self._buffer.abandon(self._name, ticket.id, "failed" if ending == "failed" else "abandoned")
            answers = ["handed back"]
        else:
            group = _group(ticket, self._name, max(self._live, ticket.version), self._stage.plan.settings.payload_bytes, random)
            if ending == "unsound":
                group = replace(group, rollouts=tuple(replace(each, reward=float("nan")) for each in group.rollouts))
            times = 2 if ending == "twice" else 1
            answers = [await self._buffer.commit(self._name, group, keep=ending != "no_signal") for _ in range(times)]
        self._journal.add("ended", ticket=ticket.id, task=ticket.task_index, how=ending, answers=answers)
        failpoint("writer.answered")
        self._stage.report_act()


def _group(ticket: Ticket, worker: str, newest: int, size: int, random: Random) -> RolloutGroup:
    """Make a group with tokens of up to two versions, between the ticket's and the live one."""
    first = random.randint(ticket.version, newest)
    length = random.randint(4, max(5, size // 24))
    switch = random.randint(2, length)
    versions = [first] * (switch - 2) + [random.randint(first, newest)] * (length - switch)
    sampled = np.arange(length) >= 2
    sample = Sample(
        token_ids=np.arange(length, dtype=np.int32),
        loss_mask=sampled.astype(np.uint8),
        logprobs=np.where(sampled, np.float32(-0.5), np.float32(0)).astype(np.float32),
        versions=spans_of(versions, offset=2),
    )
    rollouts = tuple(Rollout(samples=(sample,), reward=float(index), status=Status.OK) for index in range(2))
    task = Task(key=f"task-{ticket.task_index}", environment="chaos", prompt="p")
    return RolloutGroup(id=ticket.id, task=task, rollouts=rollouts, worker=worker)


async def write(stage: Stage) -> None:
    stop = stop_event()
    async with stage.opened() as (buffer, board):
        await Writer(stage, buffer, board).run(stop)
