"""`buffer tail`: prints events of groups as they happen.

The scripts publish them on a channel, which keeps nothing for a late listener: this is for watching, while `buffer stats`
counts.
"""

from __future__ import annotations

import sys
from datetime import datetime
from statistics import fmean, pstdev
from typing import Any

from async_rl.cli.grammar import CommandLine
from async_rl.payloads.codec import BadPayload, decode
from buffer.events import ticket_events
from buffer.payloads.validation import problem_with
from buffer.tools.open_run import OpenRun
from buffer.tools.output import print_json, visible
from buffer.tools.show import reward


async def tail(run: OpenRun, line: CommandLine) -> None:
    only = line.text("environment")
    async with ticket_events(run.redis) as incoming:
        print(f"follows run {run.redis.name!r} at {run.redis.server.url}; Ctrl-C ends it", file=sys.stderr, flush=True)
        async for event in incoming:
            row = await _describe(run, event)
            if row is None or (only is not None and row.get("environment") != only):
                continue
            if line.has("json"):
                print_json(row)
            else:
                print(_line(row), flush=True)


async def _describe(run: OpenRun, event: tuple[str, str]) -> dict[str, Any] | None:
    """Return what to print about an event; None for events that every group has."""
    what, ticket = event
    told: dict[str, Any] = {"event": what, "id": ticket}
    if what == "stored":
        payload = await run.buffer.payload(ticket)
        return told | (_summary(payload) if payload is not None else {"note": "it has left the buffer already"})
    if what == "quarantined":
        reports = [report for report in await run.buffer.quarantined() if report["ticket"] == ticket]
        return told | {name: report.get(name) for report in reports for name in ("environment", "worker", "reason")}
    return told if what.startswith("dropped:") else None


def _summary(payload: bytes) -> dict[str, Any]:
    try:
        group = decode(payload)
    except BadPayload as error:
        return {"note": f"its payload cannot be read: {error}"}
    if problem := problem_with(group):  # another client wrote it; the learner will refuse it
        return {"note": f"it is invalid: {problem}"}
    oldest, newest = group.oldest_version, group.newest_version
    rewards = [value for rollout in group.rollouts if (value := reward(rollout)) is not None]
    return {
        "environment": group.task.environment,
        "worker": group.worker,
        "reward_mean": fmean(rewards) if rewards else None,
        "reward_std": pstdev(rewards) if rewards else None,
        "rollouts": len(group.rollouts),
        "tokens": group.num_sampled,
        "versions": str(oldest) if oldest == newest else f"{oldest}-{newest}",
    }


def _line(row: dict[str, Any]) -> str:
    words = [f"{datetime.now():%H:%M:%S}", f"{row['event']:<12}", row["id"]]
    if "tokens" in row:
        scores = "no reward" if row["reward_mean"] is None else f"reward {row['reward_mean']:.3f} ± {row['reward_std']:.3f}"
        words += [f"{row['environment']:<12}", scores, f"{row['rollouts']} rollouts, {row['tokens']} tokens"]
        words += [f"version {row['versions']}", f"by {row['worker']}"]
    words += [f"{name} {row[name]}" for name in ("environment", "worker") if "tokens" not in row and row.get(name)]
    words += [str(row[name]) for name in ("reason", "note") if row.get(name)]
    return visible("  ".join(words))
