"""Sentences that the overview shows, decided from a run's metrics. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from async_rl.run_folders.waits_for import idle_shares, waits_for
from async_rl.view.metric_columns import MetricColumns


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedWarning:
    cause: str
    times: float
    page: str
    """The page that shows more."""


COUNTED = (
    ("optim/skipped", "the last step was skipped: its loss or gradient was not finite", "learner"),
    ("guard/notches", "the guard has tightened the run", "learner"),
    ("checkpoint/failed", "checkpoints could not be written", "learner"),
    ("metrics/dropped", "rows of metrics.jsonl could not be written: these pages miss them", "overview"),
    ("samples/dropped", "rows of samples.jsonl could not be written", "rollouts"),
    ("weights/dropped", "workers were left out of the last push", "fleet"),
    ("buffer/quarantined", "payloads failed validation: `async-rl buffer quarantine ls`", "staleness"),
    ("buffer/expired", "spent groups were deleted before they were archived", "rollouts"),
    ("buffer/lost_to_rollback", "spent groups were lost with a checkpoint and are rolled out again", "staleness"),
    ("rollout/rests", "environments were paused by their circuit breaker", "fleet"),
    ("rollout/left_behind", "tasks or processes leaked by episodes were ended", "fleet"),
    ("rollout/lease_lost", "groups were given up because their ticket was lost", "staleness"),
    ("gateway/refused", "requests of agents were refused", "fleet"),
)
FAMILIES = (
    ("rollout/failures/", "episodes failed at: ", "rollouts"),
    ("buffer/dropped/", "groups dropped: ", "staleness"),
)


def metric_warnings(latest: Mapping[str, float]) -> list[CountedWarning]:
    """What the last row's counters report."""
    counted = [
        CountedWarning(cause=cause, times=latest[name], page=page) for name, cause, page in COUNTED if latest.get(name, 0) > 0
    ]
    families = [
        CountedWarning(cause=text + name.removeprefix(prefix), times=value, page=page)
        for prefix, text, page in FAMILIES
        for name, value in latest.items()
        if name.startswith(prefix) and value > 0
    ]
    return counted + families


def slowest_part(latest: Mapping[str, float]) -> str:
    """One sentence on what the learner waited for in the last step; "" without the metrics."""
    return waits_for([latest]) if idle_shares([latest]) else ""


def token_fates(latest: Mapping[str, float], *, is_running: bool) -> list[tuple[str, float]]:
    """What became of every generated token, with its share; the shares add up to 1."""
    waiting = "in flight" if is_running else "left over at the end: ready, or trained after the last checkpoint"
    fates = {"trained": "tokens/trained", waiting: "tokens/in_flight"}
    found = {fate: latest[name] for fate, name in fates.items() if name in latest}
    prefix = "tokens/dropped/"
    found |= {f"dropped: {name.removeprefix(prefix)}": value for name, value in latest.items() if name.startswith(prefix)}
    if not is_running and not found.get(waiting):
        found.pop(waiting, None)
    total = sum(found.values())
    return [(fate, tokens / total) for fate, tokens in found.items()] if total > 0 else []


RECENT_STEPS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMeans:
    """What a single step says little about; None without the metrics."""

    reward: float | None
    """Mean of the last `RECENT_STEPS` steps."""
    tok_s: float | None
    """Trained tokens per second of training time, since the run began."""
    idle: float | None
    """Mean of the steps that are known."""
    steps: int = RECENT_STEPS


def run_means(columns: MetricColumns) -> RunMeans:
    """Return the means of a run from its metrics."""
    reward = columns.column("reward/mean")[-RECENT_STEPS:]
    tokens, seconds = columns.newest("progress/tokens"), columns.newest("progress/wall_s")
    idle, lasted = columns.column("idle/learner"), columns.column("time/step") + columns.column("time/wait_data")
    known = np.isfinite(idle) & np.isfinite(lasted)
    total = float(lasted[known].sum())
    return RunMeans(
        reward=float(np.nanmean(reward)) if np.isfinite(reward).any() else None,
        tok_s=tokens / seconds if tokens is not None and seconds else None,
        idle=float((idle * lasted)[known].sum()) / total if total > 0 else None,
    )
