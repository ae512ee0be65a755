"""A correct learner, workers that may misbehave, and a server that may be set back at any moment.

A spectator checks the buffer's promises, and from every state the learner must be able to continue.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Coroutine
from typing import Any, Literal

from hypothesis import note, reject
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from pydantic import ValidationError

from async_rl.config import Config
from async_rl.errors import FenceLost
from async_rl.types import Ticket
from tests.contracts.histories.promises import Spectator
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
from tests.contracts.histories.simulated_learner import BEGINNING, Interrupted, SimulatedLearner
from tests.contracts.histories.stages import Copy, Stage

ROUNDS = 5
"""Rounds in which all workers commit all they can get; the learner must get a batch within so many."""
STEPS_TO_SETTLE = 60


class BufferLife(RuleBasedStateMachine):
    open_stage: Callable[[], Stage]

    @initialize(settings=Settings)
    def begin(self, settings: dict[str, Any]) -> None:
        try:
            self.config = configured(**settings)
        except ValidationError:
            reject()
        self.settings = settings
        self.stage = self.open_stage()
        self.buffer = self.stage.buffer
        self.spectator = Spectator()
        self.learner = SimulatedLearner(self.stage, self.config, self.spectator)
        self.hands: dict[str, list[Ticket]] = {name: [] for name in WORKERS}
        self.copies: list[Copy] = []
        self.learner.start()
        self.is_whole = True
        """Whether the server has never lost anything."""
        self.is_undisturbed = _is_proven(self.config)

    def teardown(self) -> None:
        if hasattr(self, "stage"):
            try:
                if sys.exc_info()[0] is None:
                    self.settle_everything()
            finally:
                self.stage.close()

    def do(self, call: Coroutine[Any, Any, Any]) -> Any:
        return self.stage.do(call)

    # -- workers ----------------------------------------------------------------------------------------------------
    @rule(worker=Workers, count=st.integers(1, 6), waits=st.booleans())
    def reserve(self, worker: str, count: int, waits: bool = False) -> None:
        version = max(self.spectator.highest_version, self.do(self.buffer.stats()).version)
        tickets = self.do(self.buffer.reserve(worker, version=version, count=count, wait_s=0.001 if waits else 0))
        self.hands[worker] += tickets
        if tickets:
            self.spectator.gave(tickets, self.do(self.buffer.stats()), self.learner.limits)

    def hand(self, worker: str, which: int = 0) -> Ticket | None:
        hand = self.hands[worker]
        return hand.pop(which % len(hand)) if hand else None

    def roll(self, worker: str, ticket: Ticket, *, keep: bool = True, **more: Any) -> str:
        group = rolled(ticket, worker, **({"newest": ticket.version} | more))
        answer = self.do(self.buffer.commit(worker, group, keep=keep))
        if answer == "no_signal":
            self.spectator.given_up.add(ticket.task_index)
        if answer == "quarantined":
            self.spectator.failed(ticket.task_index, self.learner.limits)
        return answer

    @rule(worker=Workers, which=Some, environment=Environments, prompt=Prompts, is_newest=st.booleans())
    def commit(self, worker: str, which: int, environment: str, prompt: int, is_newest: bool) -> None:
        if ticket := self.hand(worker, which):
            live = self.do(self.buffer.stats()).version
            newest = max(live, ticket.version) if is_newest else ticket.version
            self.roll(worker, ticket, environment=environment, prompt=prompt, newest=newest)

    @rule(worker=Workers, environment=Environments, prompt=Prompts)
    def commit_all(self, worker: str, environment: str, prompt: int = 2) -> None:
        while ticket := self.hand(worker):
            self.roll(worker, ticket, environment=environment, prompt=prompt)

    @rule(worker=Workers, which=Some)
    def commit_and_repeat(self, worker: str, which: int) -> None:
        if ticket := self.hand(worker, which):
            first, again = self.roll(worker, ticket), self.roll(worker, ticket)
            assert again == ("already" if first == "stored" else first)

    @rule(worker=Workers, which=Some)
    def commit_no_signal(self, worker: str, which: int) -> None:
        if ticket := self.hand(worker, which):
            self.roll(worker, ticket, keep=False)

    @rule(worker=Workers, which=Some, how=st.sampled_from([{"logprob": 1.0}, {"newest": 10**6}]))
    def commit_unsound(self, worker: str, which: int, how: dict[str, Any]) -> None:
        if ticket := self.hand(worker, which):
            assert self.roll(worker, ticket, **how) != "stored"

    @rule(worker=Workers, which=Some, reason=st.sampled_from(["failed", "abandoned"]))
    def abandon(self, worker: str, which: int, reason: Literal["failed", "abandoned"]) -> None:
        if ticket := self.hand(worker, which):
            self.do(self.buffer.abandon(worker, ticket.id, reason))
            if reason == "failed":
                self.spectator.failed(ticket.task_index, self.learner.limits)

    @rule(worker=Workers)
    def renew(self, worker: str) -> None:
        lost = self.do(self.buffer.renew(worker, [ticket.id for ticket in self.hands[worker]]))
        self.hands[worker] = [ticket for ticket in self.hands[worker] if ticket.id not in lost]

    @rule(seconds=st.sampled_from([2, 0.6 * LEASE_S, 2 * LEASE_S]))
    def pass_time(self, seconds: float) -> None:
        self.stage.pass_time(seconds)

    # -- the learner ------------------------------------------------------------------------------------------------
    def learn(self, act: Callable[[], Any]) -> Any:
        try:
            return act()
        except Interrupted as why:
            note(f"the learner starts again: {type(why.__cause__).__name__}")
            self.is_undisturbed = False
            self.learner.start()
            return None

    @rule(patient=st.sampled_from([True, True, False]))
    def take(self, patient: bool) -> None:
        self.is_undisturbed &= patient
        self.learn(lambda: self.learner.take(patient=patient))

    @rule(act=st.sampled_from(["train", "train_a_step", "publish", "go_live", "release", "save", "checkpoint", "skip"]))
    def act(self, act: str) -> None:
        self.learn(getattr(self.learner, act))
        if act == "checkpoint" and self.is_whole:
            self.spectator.saw_spent(self.do(self.buffer.spent_groups(100)))

    @rule(weights=st.lists(st.sampled_from([0.1, 1.0, 7.0]), max_size=4))
    def prioritize(self, weights: list[float]) -> None:
        self.learn(lambda: self.learner.prioritize(weights))

    @rule(deaths=st.lists(st.sampled_from(BEGINNING), max_size=2), copies=st.booleans())
    def restart(self, deaths: list[str], copies: bool) -> None:
        """Kill the learner; its successors may die at any point of their start."""
        self.is_undisturbed = False
        for moment in deaths:
            self.learner.start(dies_after=moment)
            if copies:
                self.copy_aside()
        self.learner.start()

    @rule(which=Some, what=st.sampled_from(["take", "release", "checkpoint", "issue", "recover", "position", "hold"]))
    def act_like_an_old_learner(self, which: int, what: str) -> None:
        old, learner = self.learner.old_fences, self.learner
        if not old or learner.server_lost_changes:
            return
        arguments: dict[str, Any] = {
            "take": {"step": learner.step + 1, "version": learner.version, "num_groups": 1, "wait_s": 0},
            "release": {"step": learner.step + 1},
            "checkpoint": {"step": learner.step + 1},
            "position": {"step": learner.step},
            "issue": {"after": learner.version},
            "recover": {"position": learner.position},
            "hold": {},
        }
        try:
            self.do(getattr(self.buffer, what)(old[which % len(old)], **arguments[what]))
        except FenceLost:
            return
        raise AssertionError(f"a learner that was replaced was allowed to {what}")

    # -- servers that lose what they confirmed ----------------------------------------------------------------------
    @rule()
    def copy_aside(self) -> None:
        copy = self.stage.copy()
        if copy is not None:
            self.copies = [*self.copies[-3:], copy]

    @rule(which=Some)
    def put_back(self, which: int) -> None:
        if self.copies:
            self.set_back(self.copies[which % len(self.copies)])

    @rule(chance=st.integers(0, 3))
    def empty(self, chance: int) -> None:
        if chance == 0 and self.stage.copy() is not None:
            self.set_back({})

    def set_back(self, copy: Copy) -> None:
        self.stage.put_back(copy)
        self.learner.server_lost_changes, self.is_undisturbed, self.is_whole = True, False, False

    # -- limits -----------------------------------------------------------------------------------------------------
    @rule(change=Changes)
    def change_limits(self, change: dict[str, Any]) -> None:
        try:
            config = configured(**(self.settings | change))
        except ValidationError:
            return
        self.settings |= change
        self.do(self.buffer.change_limits(change))
        self.learner.hears_of(config.limits)
        self.is_undisturbed = False

    # -- what must hold ---------------------------------------------------------------------------------------------
    @invariant()
    def is_conserved(self) -> None:
        if hasattr(self, "stage"):
            audit = self.do(self.buffer.audit())
            assert audit.problems == ()
            assert not (self.is_undisturbed and audit.stats.dropped.get("stale", 0))

    @rule(environment=Environments)
    def get_on(self, environment: str) -> None:
        """Check that the learner gets a batch once all workers commit all they can get: no state is a deadlock."""
        for _ in range(ROUNDS):
            for worker in WORKERS:
                self.renew(worker)
            self.stage.pass_time(0.6 * LEASE_S)  # tickets that no worker holds lose their leases
            for worker in WORKERS * len(WORKERS):  # each gets a share only, so ask several times
                self.reserve(worker, self.learner.limits.slots + 1)
                self.commit_all(worker, environment)
            self.learn(self.learner.train_all)
            if self.learn(self.learner.train_a_step):
                return
        raise AssertionError(f"the learner waits for ever: {self.do(self.buffer.stats())}, {self.learner.limits}")

    def settle_everything(self) -> None:
        """Check that each task that was ever issued trains in the end, or was dropped with a reason."""
        tasks = set(self.spectator.tasks)
        for _ in range(STEPS_TO_SETTLE):
            if self.learner.limits.selector == "freshest" or not self.spectator.unsettled(tasks):
                break
            self.get_on("quick")
        else:
            raise AssertionError(f"tasks {sorted(self.spectator.unsettled(tasks))} are skipped")
        self.learn(self.learner.save)
        self.learn(self.learner.checkpoint)
        self.is_conserved()


def _is_proven(config: Config) -> bool:
    """Limits to which the proof in docs/buffer.md applies, so that nothing becomes stale: no quotas, no token budget."""
    limits = config.limits
    return (
        limits.selector == "windowed_fifo"
        and limits.samples_per_insert is None
        and not limits.quotas
        and config.batch.tokens_per_step is None
    )
