"""The memory buffer and every server get the same calls, in any order, valid or not: their replies must be equal.

This makes buffer/reference/state_machine.py a specification of the scripts. buffer_life.py checks whether the replies are
right.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any, Literal

from hypothesis import reject
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from pydantic import TypeAdapter, ValidationError

from async_rl.errors import FenceLost, ServerRewound
from async_rl.replay_protocol import ReplayBuffer
from async_rl.types import BufferPosition, SpentGroup, TakenGroup, Ticket, VersionRecord
from tests.contracts.histories.run_settings import (
    LEASE_S,
    WORKERS,
    Changes,
    Environments,
    Prompts,
    Settings,
    Some,
    Workers,
    configured,
    rolled,
)
from tests.contracts.histories.stages import Stage

COMPARED = (
    *("reserved", "ready", "again", "taken", "kept", "spent", "dropped", "quarantined", "issued", "expired"),
    *("slots", "slots_used", "owed", "version", "ready_by_version", "tokens"),
)
"""Statistics that are not compared: only a server counts the bytes of payloads, and fences may differ."""

Behind = st.integers(0, 2)


class BufferTwins(RuleBasedStateMachine):
    open_stages: Callable[[], list[Stage]]

    @initialize(settings=Settings)
    def begin(self, settings: dict[str, Any]) -> None:
        try:
            self.config = configured(**settings)
        except ValidationError:
            reject()
        self.stages = self.open_stages()
        self.tickets: list[Ticket] = []
        self.groups: list[str] = []
        self.position: BufferPosition | None = None
        self.fences: list[list[int]] = [[] for _ in self.stages]
        self.live, self.step = -1, 1
        self.acquire()
        self.recover()
        self.publish()

    def teardown(self) -> None:
        for stage in getattr(self, "stages", []):
            stage.close()

    # -- calling all twins ------------------------------------------------------------------------------------------
    def all(self, call: Callable[[ReplayBuffer], Awaitable[Any]]) -> Any:
        return self._agreed([self._ask(stage, call) for stage in self.stages])

    def all_as_learner(self, call: Callable[[ReplayBuffer, int], Awaitable[Any]], life: int = 0) -> Any:
        """Call with the newest fence, or one of the `life` before it."""
        fences = [own[-1 - life % len(own)] for own in self.fences]
        asked = zip(self.stages, fences, strict=True)
        return self._agreed([self._ask(stage, lambda buffer, fence=fence: call(buffer, fence)) for stage, fence in asked])

    def _ask(self, stage: Stage, call: Callable[[ReplayBuffer], Awaitable[Any]]) -> Any:
        stage.pass_time(0)  # the time since the last call, in which a machine may have stood still, is no part of a history
        return stage.do(self._answer(call(stage.buffer)))

    async def _answer(self, call: Awaitable[Any]) -> Any:
        try:
            answer = await call
        except (FenceLost, ServerRewound) as error:
            return type(error)
        match answer:
            case [TakenGroup(), *_]:
                return [(entry.group.id, entry.version_at_commit, entry.version_at_take) for entry in answer]
            case [SpentGroup(), *_]:
                return [(entry.id, entry.step) for entry in answer]
        return answer

    def _agreed(self, answers: list[Any]) -> Any:
        assert all(answer == answers[0] for answer in answers), answers
        return answers[0]

    # -- workers ----------------------------------------------------------------------------------------------------
    @rule(worker=Workers, count=st.integers(1, 5), behind=st.integers(0, 1), waits=st.booleans())
    def reserve(self, worker: str, count: int, behind: int, waits: bool) -> None:
        wait_s = 0.001 if waits else 0
        self.tickets += self.all(lambda buffer: buffer.reserve(worker, version=self.live - behind, count=count, wait_s=wait_s))

    @rule(
        worker=Workers,
        which=Some,
        later=st.integers(-1, 2),
        keep=st.sampled_from([True, True, False]),
        environment=Environments,
        prompt=Prompts,
    )
    def commit(self, worker: str, which: int, later: int, keep: bool, environment: str, prompt: int) -> None:
        if self.tickets:
            ticket = self.tickets[which % len(self.tickets)]
            group = rolled(ticket, worker, newest=max(0, ticket.version + later), environment=environment, prompt=prompt)
            self.all(lambda buffer: buffer.commit(worker, group, keep=keep))

    @rule(environment=Environments, prompt=Prompts)
    def commit_all(self, environment: str, prompt: int) -> None:
        for ticket in self.tickets[-8:]:
            for worker in WORKERS:
                group = rolled(ticket, worker, newest=ticket.version, environment=environment, prompt=prompt)
                self.all(lambda buffer, worker=worker, group=group: buffer.commit(worker, group))

    @rule(worker=Workers, which=Some, reason=st.sampled_from(["failed", "abandoned", "no_signal"]))
    def abandon(self, worker: str, which: int, reason: Literal["failed", "abandoned", "no_signal"]) -> None:
        if self.tickets:
            ticket = self.tickets[which % len(self.tickets)].id
            self.all(lambda buffer: buffer.abandon(worker, ticket, reason, tokens=7 * which))

    @rule(worker=Workers)
    def renew(self, worker: str) -> None:
        self.all(lambda buffer: buffer.renew(worker, [ticket.id for ticket in self.tickets[-5:]]))

    @rule(seconds=st.sampled_from([1, 0.6 * LEASE_S]))
    def pass_time(self, seconds: float) -> None:
        for stage in self.stages:
            stage.pass_time(seconds)

    # -- learners ---------------------------------------------------------------------------------------------------
    @rule()
    def acquire(self) -> None:
        self.pass_time(1)  # past the previous learner's lease
        for own, stage in zip(self.fences, self.stages, strict=True):
            own.append(stage.do(stage.buffer.acquire("learner", self.config.limits)))

    @rule(ahead=st.integers(0, 2), groups=st.integers(1, 3), patient=st.booleans(), jump=st.sampled_from([0, 0, 0, -1, 1]))
    def take(self, ahead: int, groups: int, patient: bool, jump: int) -> None:
        step, version, max_tokens = self.step + jump, self.live + ahead, self.config.batch.tokens_per_step
        taken = self.all_as_learner(
            lambda buffer, fence: buffer.take(
                fence, step=step, version=version, num_groups=groups, wait_s=0, max_tokens=max_tokens, patient=patient
            )
        )
        if isinstance(taken, list) and taken:
            self.step = max(self.step, step + 1)
            self.groups = [*self.groups, *(ticket for ticket, *_ in taken)][-6:]

    @rule()
    def publish(self) -> None:
        live = self.all_as_learner(lambda buffer, fence: buffer.issue(fence, after=self.live))
        record = VersionRecord(version=live, timeline="t", step=self.step, digest="")
        self.all_as_learner(lambda buffer, fence: buffer.publish(fence, record))
        self.live = live

    @rule(back=Behind, life=st.sampled_from([0, 0, 1]))
    def release(self, back: int, life: int) -> None:
        self.all_as_learner(lambda buffer, fence: buffer.release(fence, self.step - back), life)

    @rule(back=Behind, durable=st.booleans())
    def checkpoint(self, back: int, durable: bool) -> None:
        step = self.step - back
        position = self.all_as_learner(lambda buffer, fence: buffer.position(fence, step))
        if isinstance(position, BufferPosition):
            self.position = TypeAdapter(BufferPosition).validate_python(json.loads(json.dumps(asdict(position))))
        if durable:
            self.all_as_learner(lambda buffer, fence: buffer.checkpoint(fence, step))

    @rule()
    def recover(self) -> None:
        self.all_as_learner(lambda buffer, fence: buffer.recover(fence, self.position))
        self.step = 1 + (max(self.position.step, 0) if self.position is not None else 0)

    @rule(weights=st.lists(st.sampled_from([0.5, 1.0, 4.0]), min_size=1, max_size=6))
    def prioritize(self, weights: list[float]) -> None:
        chosen = dict(zip(self.groups, weights, strict=False))
        self.all_as_learner(lambda buffer, fence: buffer.prioritize(fence, chosen))

    @rule(most=st.integers(1, 4))
    def discard(self, most: int) -> None:
        kept = self.all(lambda buffer: buffer.spent_groups(100))
        self.all_as_learner(lambda buffer, fence: buffer.discard(fence, [ticket for ticket, _ in kept[:most]]))

    @rule(change=Changes)
    def change_limits(self, change: dict[str, Any]) -> None:
        self.all(lambda buffer: buffer.change_limits(change))

    @rule(change=st.sampled_from(["a", "b"]), is_late=st.booleans())
    def change_mix(self, change: str, is_late: bool) -> None:
        log = self.all(lambda buffer: buffer.mix())
        known = log[-1 - is_late].id if len(log) > is_late else ""
        self.all(lambda buffer: buffer.change_mix(known, change))

    # -- after each of them -----------------------------------------------------------------------------------------
    @invariant()
    def agree_and_conserve(self) -> None:
        if not hasattr(self, "stages"):
            return
        self.pass_time(0)
        audits = [stage.do(stage.buffer.audit()) for stage in self.stages]
        assert [audit.problems for audit in audits] == [()] * len(audits)
        for name in COMPARED:
            self._agreed([getattr(audit.stats, name) for audit in audits])
