"""Says in one sentence what a run waits for, from its last rows of metrics. `async-rl top`, the report and the page show it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

CAUSES = {"no_groups": "no groups ready", "pushing": "pushing", "checkpoint": "checkpoint", "other": "other"}
"""Suffixes of the metrics `idle/...`, and their names for people."""
RECENT_ROWS = 5
"""Rows over which shares are averaged: one step may contain a checkpoint by chance."""
SLOW_S = 0.5
"""Seconds from which a push may be what workers wait for."""
NOTABLE = 0.1
"""Share of the learner's time from which a wait is worth a sentence."""


def idle_shares(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean share of the learner's time in which it did not train, by cause, over rows that have it."""
    found: dict[str, float] = {}
    for cause in CAUSES:
        if present := [row[f"idle/{cause}"] for row in rows if f"idle/{cause}" in row]:
            found[cause] = sum(present) / len(present)
    return found


def waits_for(rows: Sequence[Mapping[str, float]]) -> str:
    """One sentence from the values of the last rows of a running run, the newest last."""
    if not rows:
        return "the first step has not ended: processes start, and the first groups are rolled out"
    newest, shares = rows[-1], idle_shares(rows[-RECENT_ROWS:])
    cause = max(shares, key=lambda name: shares[name], default=None)
    if cause is None or shares[cause] < NOTABLE:
        return _workers_side(newest, shares)
    share = f"{shares[cause]:.0%} of its time"
    match cause:
        case "no_groups":
            return f"the learner waits for groups {share}: {_why_no_groups(newest)}"
        case "pushing":
            push_s, workers = newest.get("weights/push_s", 0.0), newest.get("weights/workers", 0.0)
            return f"the learner waits for weight pushes {share}: the last took {push_s:.1f} s to {_workers(workers)}"
        case "checkpoint":
            stall_s = newest.get("checkpoint/stall_s", 0.0)
            return f"the learner waits for checkpoints {share}: the last blocked it for {stall_s:.1f} s"
        case _:
            return f"the learner does other work {share}: metrics, the journal, the archive"


def _why_no_groups(row: Mapping[str, float]) -> str:
    workers, in_flight = row.get("rollout/workers", 0.0), row.get("rollout/inflight", 0.0)
    generating = row.get("engine/running", 0.0) + row.get("engine/waiting", 0.0)
    if workers == 0:
        return "no worker is present"
    if _is_slow_push(row):
        return f"{_workers(workers)} had to wait for weights: the last push took {row['weights/push_s']:.1f} s"
    if in_flight == 0 and row.get("buffer/depth", 0.0) > 0:
        return f"{row['buffer/depth']:.0f} are ready, fewer than a step needs"
    if in_flight == 0:
        return f"{_workers(workers)} roll out nothing"
    if row.get("engine/waiting", 0.0) > row.get("engine/running", 0.0):
        return f"{row['engine/waiting']:.0f} generations wait for room in the engines, {row['engine/running']:.0f} run"
    if "engine/running" in row and generating == 0:
        return f"{in_flight:.0f} groups are in flight, but no engine generates: environments, tools or graders hold them"
    groups = "1 group is" if in_flight == 1 else f"{in_flight:.0f} groups are"
    return f"{groups} in flight on {_workers(workers)}, too few for its pace"


def _is_slow_push(row: Mapping[str, float]) -> bool:
    """Whether the last push took most of the time in which the learner waited, and longer than the step."""
    waited_s, step_s = row.get("time/wait_data", 0.0), row.get("time/step", 0.0)
    return row.get("weights/push_s", 0.0) >= max(0.5 * waited_s, step_s, SLOW_S)


def _workers_side(row: Mapping[str, float], shares: Mapping[str, float]) -> str:
    slots, used, ready = row.get("pace/slots"), row.get("buffer/slots_used", 0.0), row.get("buffer/depth", 0.0)
    if slots is not None and used >= slots and ready > 0 and row.get("rollout/inflight", 0.0) == 0:
        return f"the workers wait for the learner: all {slots:.0f} slots are used, {ready:.0f} groups are ready"
    return f"nothing: the learner trained {max(0.0, 1 - sum(shares.values())):.0%} of the time"


def _workers(number: float) -> str:
    return f"{number:.0f} worker{'' if number == 1 else 's'}"
