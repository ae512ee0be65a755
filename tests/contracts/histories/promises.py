"""Checks the promises of docs/buffer.md through the contract alone: no slots, no sets, no scripts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from async_rl.replay_protocol import BufferStats, Limits
from async_rl.types import SpentGroup, TakenGroup, Ticket
from tests.contracts.histories.run_settings import task_of

ROUNDING = 1e-6


class Spectator:
    """Tracks the surviving timeline: which groups trained which step of the current weights."""

    def __init__(self) -> None:
        self.timeline: dict[int, list[TakenGroup]] = {}
        self.highest_version = -1
        self.tasks: set[int] = set()
        """Tasks that were ever given to a worker."""
        self.given_up: set[int] = set()
        """Tasks that need not train: no signal, or perhaps failed too often."""
        self._failures: Counter[int] = Counter()

    # -- the workers ------------------------------------------------------------------------------------------------
    def gave(self, tickets: Sequence[Ticket], stats: BufferStats, limits: Limits) -> None:
        self.tasks |= {ticket.task_index for ticket in tickets}
        assert {ticket.version for ticket in tickets} == {stats.version}
        assert stats.slots_used <= stats.slots == limits.slots
        if limits.samples_per_insert is not None:
            keeps_the_rate = stats.owed + limits.samples_per_insert * stats.reserved <= limits.max_diff + ROUNDING
            # When nothing is in flight, the rate limiter lets the next step's groups start.
            needed = max(limits.groups_per_step, limits.min_size)
            assert keeps_the_rate or stats.ready + stats.again + stats.reserved <= needed

    def failed(self, task: int, limits: Limits) -> None:
        self._failures[task] += 1
        if self._failures[task] >= limits.max_attempts:
            self.given_up.add(task)

    # -- the learner ------------------------------------------------------------------------------------------------
    def issued(self, version: int) -> None:
        assert version > self.highest_version, f"version {version} after {self.highest_version}"
        self.highest_version = version

    def took(self, step: int, version: int, batch: Sequence[TakenGroup], limits: Limits, max_tokens: int | None) -> None:
        ids = [entry.group.id for entry in batch]
        assert len(set(ids)) == len(ids), f"step {step} holds a group twice: {ids}"
        self.timeline[step] = list(batch)
        self._is_of_the_right_size(batch, limits, max_tokens)
        uses = self.uses()
        for entry in batch:
            age = version - entry.group.oldest_version
            assert age <= limits.age_bound, f"{entry.group.id} is {age} versions old at step {step}"
            assert uses[entry.group.id] <= limits.max_uses, f"{entry.group.id} trains {uses[entry.group.id]} steps"

    def _is_of_the_right_size(self, batch: Sequence[TakenGroup], limits: Limits, max_tokens: int | None) -> None:
        if max_tokens is None:
            assert len(batch) == limits.groups_per_step
        elif len(batch) > 1:
            assert len(batch) <= limits.groups_per_step
            assert sum(entry.group.num_tokens for entry in batch) <= max_tokens

    def resumed(self, step: int) -> None:
        """Return to the weights of an earlier step; steps after it no longer count."""
        self.timeline = {done: batch for done, batch in self.timeline.items() if done <= step}

    def saw_spent(self, groups: Sequence[SpentGroup]) -> None:
        for group in groups:
            assert group.step in self._steps_of(group.id), f"{group.id} is spent by step {group.step}, which never trained it"

    # -- looking things up ------------------------------------------------------------------------------------------
    def uses(self) -> Counter[str]:
        return Counter(entry.group.id for batch in self.timeline.values() for entry in batch)

    def _steps_of(self, group: str) -> list[int]:
        return [step for step, batch in self.timeline.items() if any(entry.group.id == group for entry in batch)]

    def unsettled(self, tasks: set[int]) -> set[int]:
        trained = {task_of(entry.group) for batch in self.timeline.values() for entry in batch}
        return tasks - trained - self.given_up
