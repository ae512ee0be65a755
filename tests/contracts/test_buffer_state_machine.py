"""Whatever is done to them, the memory buffer and Redis answer alike and stay conserved."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Literal

import pytest
from groups import group
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from runs import limits

from async_rl.errors import FenceLost, ServerRewound
from async_rl.protocols import ReplayBuffer
from async_rl.types import BufferPosition, TakenGroup, Ticket, VersionRecord
from buffer.memory_buffer import MemoryBuffer
from buffer.redis_buffer import RedisBuffer
from buffer.redis_client import Server

_runs = itertools.count()

Age = st.integers(-2, 1)
Some = st.integers(0, 10**6)


class BothBuffers(RuleBasedStateMachine):
    """One learner after the other and two workers, in any order that hypothesis can think of."""

    url: str

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.server = self.runner.run(self._connect())
        self.buffers: list[ReplayBuffer] = [MemoryBuffer(), RedisBuffer(self.server, f"machine-{next(_runs)}")]
        self.tickets: list[Ticket] = []
        self.position: BufferPosition | None = None
        self.fences = [0, 0]
        self.live = -1
        self.step = 1
        self.acquire()
        self.recover()
        self.publish()

    async def _connect(self) -> Server:
        return Server(self.url, patience_s=30)

    def teardown(self) -> None:
        self.runner.run(self.server.close())
        self.runner.close()

    def both(self, call: Callable[[ReplayBuffer], Awaitable[object]]) -> object:
        answers = [self.runner.run(self._answer(call, buffer)) for buffer in self.buffers]
        assert answers[0] == answers[1]
        return answers[0]

    def fence(self, buffer: ReplayBuffer) -> int:
        return self.fences[self.buffers.index(buffer)]

    async def _answer(self, call: Callable[[ReplayBuffer], Awaitable[object]], buffer: ReplayBuffer) -> object:
        try:
            answer = await call(buffer)
        except (FenceLost, ServerRewound) as error:
            return type(error)
        if isinstance(answer, list) and answer and isinstance(answer[0], TakenGroup):
            return [(entry.group.id, entry.version_at_commit, entry.version_at_take) for entry in answer]
        return answer

    @rule()
    def acquire(self) -> None:
        if self.live >= 0:
            self.both(lambda buffer: buffer.resign(self.fence(buffer)))
        rules = limits(max_age=2, groups_per_step=2, max_attempts=2, lease_s=10_000)
        self.fences = [self.runner.run(buffer.acquire("learner", rules)) for buffer in self.buffers]

    @rule(worker=st.sampled_from("ab"), count=st.integers(1, 4), behind=st.integers(0, 1))
    def reserve(self, worker: str, count: int, behind: int) -> None:
        self.tickets += self.both(lambda buffer: buffer.reserve(worker, version=self.live - behind, count=count, wait_s=0))

    @rule(worker=st.sampled_from("ab"), which=Some, later=st.integers(-1, 2), keep=st.sampled_from([True, True, True, False]))
    def commit(self, worker: str, which: int, later: int, keep: bool) -> None:
        if self.tickets:
            ticket = self.tickets[which % len(self.tickets)]
            rolled = group(ticket, versions=(max(0, ticket.version + later), ticket.version + max(0, later)), worker=worker)
            self.both(lambda buffer: buffer.commit(worker, rolled, keep=keep))

    @rule(worker=st.sampled_from("ab"))
    def commit_all(self, worker: str) -> None:
        for ticket in self.tickets[-8:]:
            self.both(lambda buffer, ticket=ticket: buffer.commit(worker, group(ticket)))

    @rule(worker=st.sampled_from("ab"), which=Some, reason=st.sampled_from(["failed", "abandoned", "no_signal"]))
    def abandon(self, worker: str, which: int, reason: Literal["failed", "abandoned", "no_signal"]) -> None:
        if self.tickets:
            self.both(lambda buffer: buffer.abandon(worker, self.tickets[which % len(self.tickets)].id, reason))

    @rule(worker=st.sampled_from("ab"))
    def renew(self, worker: str) -> None:
        self.both(lambda buffer: buffer.renew(worker, [ticket.id for ticket in self.tickets[-5:]]))

    @rule(ahead=st.integers(0, 2), groups=st.integers(1, 3), patient=st.booleans())
    def take(self, ahead: int, groups: int, patient: bool) -> None:
        step, version = self.step, self.live + ahead
        taken = self.both(
            lambda buffer: buffer.take(self.fence(buffer), step=step, version=version, num_groups=groups, wait_s=0, patient=patient)
        )
        if taken:
            self.step += 1

    @rule()
    def publish(self) -> None:
        self.live = self.both(lambda buffer: buffer.issue(self.fence(buffer), after=self.live))
        record = VersionRecord(version=self.live, timeline="t", step=self.step, digest="")
        self.both(lambda buffer: buffer.publish(self.fence(buffer), record))

    @rule(back=st.integers(0, 2))
    def release(self, back: int) -> None:
        self.both(lambda buffer: buffer.release(self.fence(buffer), self.step - back))

    @rule(back=st.integers(0, 2), durable=st.booleans())
    def checkpoint(self, back: int, durable: bool) -> None:
        self.position = self.both(lambda buffer: buffer.position(self.fence(buffer), self.step - back))
        if durable:
            self.both(lambda buffer: buffer.checkpoint(self.fence(buffer), self.step - back))

    @rule()
    def recover(self) -> None:
        self.both(lambda buffer: buffer.recover(self.fence(buffer), self.position))
        self.step = 1 + (max(self.position.step, 0) if self.position is not None else 0)

    @invariant()
    def agree_and_conserve(self) -> None:
        audits = [self.runner.run(buffer.audit()) for buffer in self.buffers]
        assert [audit.problems for audit in audits] == [(), ()]
        here, there = (audit.stats for audit in audits)
        for name in ("reserved", "ready", "again", "taken", "kept", "owed", "spent", "dropped", "quarantined", "issued", "slots_used", "version"):
            assert getattr(here, name) == getattr(there, name), name
        assert here.ready_by_version == there.ready_by_version


@pytest.mark.filterwarnings("ignore::hypothesis.errors.NonInteractiveExampleWarning")
def test_memory_and_redis_answer_alike(redis_server: str):
    machine = type("BothBuffers", (BothBuffers,), {"url": redis_server})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=60,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,  # the same sequences in every session
            suppress_health_check=list(HealthCheck),
        ),
    )
