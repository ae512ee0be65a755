"""Metrics of all workers together. Workers post snapshots of counters; rates come from their differences."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from async_rl.config import HEARTBEAT_S
from async_rl.protocols import Board
from async_rl.telemetry import WORKER_METRICS

RATE_S = 10 * HEARTBEAT_S
"""Window of the rate of sampled tokens: workers sample in bursts, and between two snapshots there may be none."""
FORGET_S = 10 * HEARTBEAT_S
"""A worker that posted nothing for this long is not counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCounters:
    """The last snapshot of one worker."""

    at: float
    counters: Mapping[str, float]
    tokens: tuple[tuple[float, float], ...]
    """Times of the snapshots of the last `RATE_S` seconds, with their counts of sampled tokens; the oldest first."""

    @property
    def tok_s(self) -> float:
        """Tokens per second over these snapshots."""
        (first, before), (last, now) = self.tokens[0], self.tokens[-1]
        return (now - before) / (last - first) if last > first else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport:
    """A worker's counters as they arrive."""

    worker: str
    counters: Mapping[str, float]
    sent_at: float | None
    """In seconds since 1970 by the worker's clock."""
    boot: str
    """The boot id of its machine."""
    num_workers: int
    """Workers that have reported so far."""


class FleetMetrics:
    def __init__(self, board: Board, *, on_report: Callable[[WorkerReport], None] = lambda _: None):
        self._board, self._on_report = board, on_report
        self._workers: dict[str, WorkerCounters] = {}
        self._reported: dict[str, tuple[float, float]] = {}
        """Per worker: scored episodes and the sum of their rewards at the last row."""

    async def run(self) -> None:
        """consumes: snapshots (board.read)    produces: the latest of each worker    unblocked by: any worker"""
        position = "$"
        while True:
            for at, message in await self._board.read(WORKER_METRICS, after=position, wait_s=HEARTBEAT_S):
                position = at
                self._add(message["worker"], message["counters"])
                self._on_report(
                    WorkerReport(
                        worker=message["worker"],
                        counters=message["counters"],
                        sent_at=sent_at if isinstance(sent_at := message.get("time"), int | float) else None,
                        boot=str(message.get("boot", "")),
                        num_workers=len(self._workers),
                    )
                )

    def _add(self, worker: str, counters: Mapping[str, float]) -> None:
        at, tokens, last = time.monotonic(), counters.get("tokens", 0.0), self._workers.get(worker)
        known = last.tokens if last is not None and last.tokens[-1][1] <= tokens else ()  # one that began anew counts from 0
        recent = (*(each for each in known if each[0] > at - RATE_S), (at, tokens))
        self._workers[worker] = WorkerCounters(at=at, counters=counters, tokens=recent)

    @property
    def num_workers(self) -> int:
        return len(self._recent())

    def _recent(self) -> list[WorkerCounters]:
        since = time.monotonic() - FORGET_S
        return [worker for worker in self._workers.values() if worker.at > since]

    def _new_episodes(self) -> dict[str, float]:
        """Return the mean reward of the episodes that ended since the last row; empty if none did."""
        count = total = 0.0
        for name, worker in self._workers.items():
            scored, rewards = (_sum_of(worker.counters, prefix) for prefix in ("scored/", "reward_sum/"))
            scored_before, rewards_before = self._reported.get(name, (0.0, 0.0))
            count, total = count + scored - scored_before, total + rewards - rewards_before
            self._reported[name] = (scored, rewards)
        return {"rollout/reward": total / count} if count > 0 else {}

    def row(self) -> dict[str, float]:
        """Return the metrics of the workers that reported recently."""
        fleet = self._recent()

        def total(counter: str) -> float:
            return sum(worker.counters.get(counter, 0.0) for worker in fleet)

        def named(prefix: str) -> dict[str, float]:
            """Return totals of the counters with this prefix, by the rest of their names."""
            names = {name.removeprefix(prefix) for worker in fleet for name in worker.counters if name.startswith(prefix)}
            return {name: total(prefix + name) for name in names}

        scored, kv_blocks, left_behind = named("scored/"), total("kv_blocks"), named("left_behind/")
        return {
            "rollout/workers": len(fleet),
            **self._new_episodes(),
            "rollout/inflight": total("inflight"),
            "rollout/tok_s": sum(worker.tok_s for worker in fleet),
            "rollout/episodes": total("episodes"),
            "rollout/forked": total("forked"),
            "rollout/refills": total("refills"),
            "rollout/rests": total("rests"),
            "rollout/left_behind": sum(left_behind.values()),
            **{f"rollout/left_behind/{what}": count for what, count in left_behind.items()},
            "rollout/lease_lost": total("groups/lease_lost"),
            **{f"rollout/failures/{boundary}": count for boundary, count in named("failed/").items()},
            "engine/kv_used": total("kv_blocks_used") / kv_blocks if kv_blocks else 0.0,
            **{f"engine/{name}": count for name, count in named("engine/").items()},
            **{f"gateway/{name}": count for name, count in named("gateway/").items()},
            **{f"environment/{name}/groups": count for name, count in named("landed/").items()},
            **{f"environment/{name}/failed": count for name, count in named("broke/").items()},
            **{f"environment/{name}/unavailable": count for name, count in named("unavailable/").items()},
            **{
                f"environment/{name}/reward": rewards / scored[name]
                for name, rewards in named("reward_sum/").items()
                if scored.get(name)
            },
        }


def _sum_of(counters: Mapping[str, float], prefix: str) -> float:
    return sum(count for name, count in counters.items() if name.startswith(prefix))
