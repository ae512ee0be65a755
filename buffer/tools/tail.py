"""`buffer tail`: what happens to groups, as it happens.

The scripts that change the buffer tell it on a channel. Nothing is kept for a listener that is late: this is for watching,
not for counting (`buffer stats` counts).
"""

from __future__ import annotations

import math
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any, cast

from redis.exceptions import RedisError

from async_rl.cli.grammar import Line
from async_rl.types import RolloutGroup
from buffer import keys
from buffer.payloads.codec import BadPayload, decode
from buffer.payloads.validation import problem_with
from buffer.server.client import Server
from buffer.tools.open_run import OpenRun
from buffer.tools.output import print_json, visible
from buffer.tools.show import reward


async def tail(run: OpenRun, line: Line) -> int:
    only = line.text("environment")
    async with events(run.server, run.config.run.name) as happenings:
        print(f"follows run {run.config.run.name!r} at {run.server.url}; Ctrl-C ends it", file=sys.stderr, flush=True)
        async for event in happenings:
            story = await _story(run, event)
            if story is None or (only is not None and story.get("environment") != only):
                continue
            if line.has("json"):
                print_json(story)
            else:
                print(_sentence(story), flush=True)
    return 0


@asynccontextmanager
async def events(server: Server, run: str) -> AsyncGenerator[AsyncIterator[tuple[str, str]]]:
    """What happens from here on, and to which group; for ever."""
    subscription: Any = cast("Any", server.waits).pubsub()
    try:
        await server.ask(lambda: _subscribed(subscription, keys.events_channel(run)))
        yield _heard(server, subscription)
    finally:
        await subscription.aclose()


async def _subscribed(subscription: Any, channel: str) -> None:
    await subscription.subscribe(channel)
    while await subscription.get_message(timeout=None) is None:
        pass


async def _heard(server: Server, subscription: Any) -> AsyncIterator[tuple[str, str]]:
    while True:
        try:
            message = await subscription.get_message(ignore_subscribe_messages=True, timeout=None)
        except RedisError:
            await server.ping()  # until it is back; the subscription is then renewed with its connection
            continue
        if message is not None:
            event, _, ticket = message["data"].decode(errors="replace").partition(" ")
            yield event, ticket


async def _story(run: OpenRun, event: tuple[str, str]) -> dict[str, Any] | None:
    """What there is to tell about it. None for what happens to every group in the course of things."""
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
    if problem := problem_with(group):  # somebody else wrote it; the learner will refuse it
        return {"note": f"it is unsound: {problem}"}
    rewards = [value for rollout in group.rollouts if (value := reward(rollout)) is not None]
    mean = math.fsum(rewards) / len(rewards) if rewards else None
    spread = None if mean is None else math.sqrt(math.fsum((value - mean) ** 2 for value in rewards) / len(rewards))
    return {
        "environment": group.task.environment,
        "worker": group.worker,
        "reward_mean": mean,
        "reward_std": spread,
        "rollouts": len(group.rollouts),
        "tokens": group.num_sampled,
        "versions": _versions(group),
    }


def _versions(group: RolloutGroup) -> str:
    oldest, newest = group.oldest_version, group.newest_version
    return str(oldest) if oldest == newest else f"{oldest}-{newest}"


def _sentence(story: dict[str, Any]) -> str:
    words = [f"{datetime.now():%H:%M:%S}", f"{story['event']:<12}", story["id"]]
    if "tokens" in story:
        scores = (
            "no reward" if story["reward_mean"] is None else f"reward {story['reward_mean']:.3f} ± {story['reward_std']:.3f}"
        )
        words += [f"{story['environment']:<12}", scores, f"{story['rollouts']} rollouts, {story['tokens']} tokens"]
        words += [f"version {story['versions']}", f"by {story['worker']}"]
    words += [f"{name} {story[name]}" for name in ("environment", "worker") if "tokens" not in story and story.get(name)]
    words += [str(story[name]) for name in ("reason", "note") if story.get(name)]
    return visible("  ".join(words))
