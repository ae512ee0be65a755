"""Counters of a worker. They only grow, so the difference of two snapshots is what happened in between."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from async_rl.replay_protocol import CommitResult, Drop
from async_rl.types import Failure, Rollout, Task


class Counters:
    def __init__(self) -> None:
        self.episodes = 0
        self.tokens = 0
        """Sampled tokens."""
        self.forked = 0
        """Token rows beyond the first of an episode: the agent sent a history that did not continue what was sampled."""
        self.tasks_not_posed = 0
        self.refills = 0
        """Failed siblings that were played again."""
        self.pauses = 0
        """How often a circuit breaker opened. Posted as `rests`."""
        self.leaked: Counter[str] = Counter()
        """Leaks of episodes, by kind: tasks, processes, stubborn (tasks that ignore cancellation). Posted as `left_behind`."""
        self.failures: Counter[str] = Counter()
        """Failed episodes, by boundary."""
        self.groups: Counter[CommitResult | Drop] = Counter()
        """Ended groups, by outcome."""
        self.scored: Counter[str] = Counter()
        """Episodes with a reward, by environment."""
        self.reward_sums: dict[str, float] = {}
        self.failed: Counter[str] = Counter()
        """Failed episodes, by environment. Posted as `broke`."""
        self.stored: Counter[str] = Counter()
        """Groups the buffer stored, by environment. Posted as `landed`."""
        self.unavailable: Counter[str] = Counter()
        """Tickets handed back because their environment cannot be made here, by environment."""

    def add_rollout(self, task: Task, rollout: Rollout) -> None:
        self.episodes += 1
        self.tokens += rollout.num_sampled
        self.forked += max(0, len(rollout.samples) - 1)
        if rollout.failure is not None:
            self.failures[rollout.failure.boundary] += 1
            self.failed[task.environment] += 1
            return
        self.scored[task.environment] += 1
        self.reward_sums[task.environment] = self.reward_sums.get(task.environment, 0.0) + rollout.reward

    def add_unposed_task(self, failure: Failure) -> None:
        self.tasks_not_posed += 1
        self.failures[failure.boundary] += 1

    def snapshot(self) -> Mapping[str, float]:
        """Return all counters by the names under which they are posted."""
        return {
            "episodes": self.episodes,
            "tokens": self.tokens,
            "forked": self.forked,
            "tasks_not_posed": self.tasks_not_posed,
            "refills": self.refills,
            "rests": self.pauses,
            **{f"left_behind/{what}": count for what, count in self.leaked.items()},
            **{f"failed/{boundary}": count for boundary, count in self.failures.items()},
            **{f"groups/{ending}": count for ending, count in self.groups.items()},
            **{f"scored/{environment}": count for environment, count in self.scored.items()},
            **{f"reward_sum/{environment}": total for environment, total in self.reward_sums.items()},
            **{f"broke/{environment}": count for environment, count in self.failed.items()},
            **{f"landed/{environment}": count for environment, count in self.stored.items()},
            **{f"unavailable/{environment}": count for environment, count in self.unavailable.items()},
        }
