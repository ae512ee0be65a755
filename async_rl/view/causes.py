"""Sentences that the overview shows, decided from a run's metrics. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from async_rl.run_folders.waits_for import idle_shares, waits_for


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


def token_fates(latest: Mapping[str, float]) -> list[tuple[str, float]]:
    """What became of every generated token, with its share; the shares add up to 1."""
    fates = {"trained": "tokens/trained", "in flight": "tokens/in_flight"}
    found = {fate: latest[name] for fate, name in fates.items() if name in latest}
    prefix = "tokens/dropped/"
    found |= {f"dropped: {name.removeprefix(prefix)}": value for name, value in latest.items() if name.startswith(prefix)}
    total = sum(found.values())
    return [(fate, tokens / total) for fate, tokens in found.items()] if total > 0 else []
