"""Pure: compute the measures of each environment from the results of its tasks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import fmean

from async_rl.config.evaluation import EvaluationConfig
from async_rl.telemetry.estimates import Estimate, estimate_mean, estimate_share, pass_at_k
from async_rl.telemetry.evaluation_rows import HIGH, LOW
from async_rl.types import Rollout, Status
from rollout_workers.evaluation.evaluator import TaskResult


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentMeasures:
    """Counts and estimates of one environment."""

    environment: str
    tasks: int
    episodes: int
    failed: int
    """Episodes without a reward. They count nowhere else, and not as wrong answers."""
    truncated: int
    length: float
    """Mean number of sampled tokens."""
    estimates: Mapping[str, Estimate]
    """Estimates by name: mean@4, pass@1, greedy, greedy_pass@1. Measures for which no task has enough samples are absent."""

    @property
    def metrics(self) -> dict[str, float]:
        """All values under their names in the table of metrics."""
        measures = {
            name: value
            for measure, estimate in self.estimates.items()
            for name, value in ((measure, estimate.mean), (measure + LOW, estimate.low), (measure + HIGH, estimate.high))
            if isfinite(value)
        }
        shares = {"failed": self.failed / self.episodes, "truncated": self.truncated / self.episodes, "length": self.length}
        every = {**measures, **shares, "tasks": self.tasks}
        return {f"eval/{self.environment}/{name}": value for name, value in every.items()}


def measure(results: Sequence[TaskResult], settings: EvaluationConfig) -> list[EnvironmentMeasures]:
    """Measure each environment, in the order of the results."""
    environments = dict.fromkeys(result.task.environment for result in results)
    return [_measure_one(name, [each for each in results if each.task.environment == name], settings) for name in environments]


def _measure_one(environment: str, results: Sequence[TaskResult], settings: EvaluationConfig) -> EnvironmentMeasures:
    played = [rollout for result in results for rollout in (*result.samples, result.greedy) if rollout is not None]
    answered = scored(played)
    return EnvironmentMeasures(
        environment=environment,
        tasks=len(results),
        episodes=len(played),
        failed=len(played) - len(answered),
        truncated=sum(rollout.status is Status.TRUNCATED for rollout in answered),
        length=fmean(rollout.num_sampled for rollout in answered) if answered else 0.0,
        estimates=_estimates(results, settings),
    )


def _estimates(results: Sequence[TaskResult], settings: EvaluationConfig) -> dict[str, Estimate]:
    samples = [answered for result in results if (answered := scored(result.samples))]
    greedy = scored(result.greedy for result in results if result.greedy is not None)
    found: dict[str, Estimate] = {}
    if samples:
        found[f"mean@{settings.samples}"] = estimate_mean([fmean(each.reward for each in task) for task in samples])
    for k in settings.k:
        if values := [pass_at_k(len(task), num_right(task, settings), k) for task in samples if len(task) >= k]:
            found[f"pass@{k}"] = estimate_share(values)
    if greedy:
        found["greedy"] = estimate_mean([rollout.reward for rollout in greedy])
        found["greedy_pass@1"] = estimate_share([float(is_right(rollout, settings)) for rollout in greedy])
    return found


def scored(rollouts: Iterable[Rollout]) -> list[Rollout]:
    return [rollout for rollout in rollouts if rollout.status is not Status.FAILED]


def num_right(rollouts: Iterable[Rollout], settings: EvaluationConfig) -> int:
    return sum(is_right(rollout, settings) for rollout in rollouts)


def is_right(rollout: Rollout, settings: EvaluationConfig) -> bool:
    return rollout.reward >= settings.solved_at
