"""Measure what the control traffic of many workers costs Redis, the learner and themselves, with the real clients and messages.

Each worker sends heartbeats, holds tickets, commits small groups and answers pushes, as docs/scale.md says. Costs are CPU time,
so a busy machine changes them little; a fleet that is too large for it is late, which shows in its heartbeats a second. Two
patterns: in `busy` workers have all the tickets that they want; in `waiting` the slots are the limit, so that every worker has
room and waits for tickets. With --stretch N all intervals are N times as long, so that a fleet N times as large fits on the
machine; figures are still those of a worker and a second of the fleet that is not stretched.

    python benchmarks/scale.py --workers 50 100 200 --json result.json
    python benchmarks/scale.py --workers 1000 --stretch 10
    python benchmarks/scale.py --workers 100 --cluster
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from buffer_parts.script_log import script_log
from buffer_parts.server import server
from redis import Redis
from scale_parts.fleet import RUN, Pattern
from scale_parts.leader import Leader

from async_rl.config import HEARTBEAT_S
from async_rl.replay_protocol import Limits
from buffer.board import RedisBoard
from buffer.keys import key
from buffer.redis_buffer import RedisBuffer
from buffer.server.client import Server
from buffer.server.embedded.programs import find_binary

HERE = Path(__file__).resolve().parent
WORKERS_PER_PROCESS = 100
WARM_UP_S = 10.0
LOGGED_S = 10.0
LEASE_S = 10.0
"""The learner's; tickets have three times as long."""
ON_TIME = 0.95
"""Heartbeats of a worker in a second, below which it is late."""
NOMINAL = 1000
"""Workers that shares are given for."""
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    workers: int
    redis_us: float
    """CPU time of the server for a worker and second."""
    worker_us: float
    """CPU time of a worker's client for a second."""
    learner_us: float
    """CPU time of the learner for a worker and second."""
    calls: Mapping[str, float]
    """Script or command -> calls for a worker and second."""
    call_us: Mapping[str, float]
    """Script or command -> microseconds of the server for a call."""
    push_s: float
    groups: float
    """Groups of a worker in a second."""
    pushes: float
    """Pushes in a second."""
    beats: float
    """Heartbeats that a worker sent in a second. Below 1: this machine is too slow for so many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    group_s: float = 10.0
    """Seconds from one group of a worker to its next."""
    push_s: float = 5.0
    """Seconds from push to push."""
    waits: bool = False
    """The slots are the limit: a group takes a tenth of the time, workers have room for two, and wait for tickets."""
    stretch: float = 1.0
    """All intervals take that many times as long as they say."""

    @property
    def pattern(self) -> Pattern:
        taken_s, in_flight = (self.group_s / 10, 2) if self.waits else (self.group_s, 1)
        return Pattern(group_s=taken_s * self.stretch, in_flight=in_flight, heartbeat_s=HEARTBEAT_S * self.stretch)

    def limits(self, workers: int) -> Limits:
        """A step has the groups of the time between two pushes."""
        size = max(1, round(workers * self.push_s / self.group_s))
        return Limits(
            max_age=1 if self.waits else 7 + workers // size, groups_per_step=size, lease_s=30.0 * self.stretch, max_attempts=3
        )


PATTERNS = {"busy": Traffic(), "waiting": Traffic(waits=True)}
MODEL = (Traffic(), Traffic(group_s=40.0), Traffic(group_s=2.5), Traffic(push_s=1.25), Traffic(push_s=20.0))
"""Traffics from which the costs of heartbeats, groups and pushes are told apart."""


@contextmanager
def fleet(url: str, workers: int, does: Pattern) -> Iterator[list[int]]:
    """Start the workers, and yield the process ids."""
    started: list[subprocess.Popen[bytes]] = []
    try:
        for first in range(0, workers, WORKERS_PER_PROCESS):
            count = min(WORKERS_PER_PROCESS, workers - first)
            words = [url, str(first), str(count), str(does.group_s), str(does.in_flight), str(does.heartbeat_s)]
            where = os.environ | {"PYTHONPATH": str(HERE)}
            started.append(subprocess.Popen([sys.executable, "-m", "scale_parts.fleet", *words], env=where))
        yield [process.pid for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICK_S


def server_cpu_s(redis: Redis) -> float:
    found = redis.info("cpu")
    return found["used_cpu_user"] + found["used_cpu_sys"]


async def measure(url: str, node: str, traffic: Traffic, workers: int, seconds: float) -> Measured:
    """`url`: what workers connect to; `node`: the server that has the run."""
    servers = Server(url), Server(url)
    buffer, board = RedisBuffer(servers[0], RUN, learner_lease_s=LEASE_S * traffic.stretch), RedisBoard(servers[1], RUN)
    stretch = traffic.stretch
    leader = Leader(
        buffer, board, traffic.limits(workers), every_s=traffic.push_s * stretch, heartbeat_s=traffic.pattern.heartbeat_s
    )
    begun = asyncio.Event()
    with Redis.from_url(node) as redis, fleet(url, workers, traffic.pattern) as pids:
        leading = asyncio.create_task(leader.run(workers, begun))
        waits = asyncio.create_task(begun.wait())
        await asyncio.wait([leading, waits], return_when=asyncio.FIRST_COMPLETED)
        if leading.done():
            leading.result()
        await asyncio.sleep(max(WARM_UP_S, 2 * traffic.push_s) * stretch)
        counts = leader.pushes, leader.groups
        before = time.monotonic(), server_cpu_s(redis), sum(map(cpu_s, pids)), time.process_time()
        await asyncio.sleep(seconds * stretch)
        after = time.monotonic(), server_cpu_s(redis), sum(map(cpu_s, pids)), time.process_time()
        pushes, groups = leader.pushes - counts[0], leader.groups - counts[1]
        with script_log(node) as costs:
            logged_at = time.monotonic()
            await asyncio.sleep(LOGGED_S * stretch)
            logged_s = (time.monotonic() - logged_at) / stretch
        leading.cancel()
        await asyncio.wait([leading])
        redis.delete(*redis.scan_iter(f"{key(RUN, '')}*".replace("{", "[{]").replace("}", "[}]"), count=1000))
    for each in servers:
        await each.close()
    passed, of_server, of_workers, of_learner = (late - early for early, late in zip(before, after, strict=True))
    passed /= stretch
    each_us = 1e6 / (passed * workers)
    return Measured(
        workers=workers,
        redis_us=of_server * each_us,
        worker_us=of_workers * each_us,
        learner_us=of_learner * each_us,
        calls={script: len(calls) / (logged_s * workers) for script, calls in costs.items()},
        call_us={script: sum(calls) / len(calls) for script, calls in costs.items()},
        push_s=median(leader.push_s[1:] or leader.push_s),  # without the first, which all workers begin with
        groups=groups / (passed * workers),
        pushes=pushes / passed,
        beats=len(costs.get("announce", ())) / (logged_s * workers) - pushes / passed,
    )


def show(name: str, found: Measured) -> None:
    share = found.redis_us * NOMINAL / 1e6
    print(
        f"\n{name}, {found.workers} workers, {found.beats:.2f} heartbeats a second; CPU time for a worker and second: "
        f"Redis {found.redis_us:.0f} us, {share:.0%} of a core for {NOMINAL}; learner {found.learner_us:.0f} us; "
        f"the worker itself {found.worker_us:.0f} us; a push's messages take {found.push_s:.2f} s"
    )
    if found.beats < ON_TIME:
        print("  the machine is too slow for so many workers: they send less than they should, and the costs are too low")
    spent = {script: found.calls[script] * found.call_us[script] for script in found.calls}
    for script, cost in sorted(spent.items(), key=lambda each: -each[1])[:14]:
        print(
            f"  {script:<14} {found.calls[script]:8.3f} calls  {found.call_us[script]:8.1f} us each  "
            f"{cost * NOMINAL / 1e6:6.1%} of a core for {NOMINAL}"
        )
    rest = found.redis_us - sum(spent.values())
    print(f"  {'the rest':<14} {'':29} {rest * NOMINAL / 1e6:6.1%}: connections, notifications, commands that are no scripts")


def figures(name: str, found: Measured) -> dict[str, float]:
    head = f"{name}_{found.workers}"
    return {
        f"{head}_redis_us": found.redis_us,
        f"{head}_worker_us": found.worker_us,
        f"{head}_learner_us": found.learner_us,
        f"{head}_push_s": found.push_s,
        f"{head}_beats": found.beats,
    }


def model(found: Sequence[Measured]) -> dict[str, float]:
    """Split the server's time among heartbeats, groups and pushes, by least squares; the same for the learner's."""
    rows = np.array([[each.beats, each.groups, each.pushes] for each in found])
    fits = {
        who: np.linalg.lstsq(rows, np.array([getattr(each, f"{who}_us") for each in found]), rcond=None)[0]
        for who in ("redis", "learner")
    }
    names = ("worker_second", "group", "push_to_a_worker")
    return {f"{who}_us_of_a_{name}": float(cost) for who, fit in fits.items() for name, cost in zip(names, fit, strict=True)}


@contextmanager
def servers(is_cluster: bool) -> Iterator[tuple[str, str]]:
    """Yield the address for workers, and that of the node that has the run."""
    with ExitStack() as opened:
        if not is_cluster:
            where = opened.enter_context(server())
            yield where, where
            return
        sys.path.insert(0, str(HERE.parent))
        from tests.support.private_fleet import private_cluster

        nodes = opened.enter_context(private_cluster(find_binary(), masters=3))
        slot: Any = nodes[0].ask.execute_command("CLUSTER", "KEYSLOT", key(RUN, "state"))
        owner = nodes[int(slot) * 3 // 16384]
        url = "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in nodes)
        yield url, f"redis://127.0.0.1:{owner.port}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[50, 100, 200])
    parser.add_argument("--model", type=int, metavar="WORKERS", help="also split the costs among heartbeats, groups and pushes")
    parser.add_argument("--patterns", nargs="*", choices=PATTERNS, default=list(PATTERNS))
    parser.add_argument("--seconds", type=float, default=20.0, help="time that is measured, unstretched (default: 20)")
    parser.add_argument("--stretch", type=float, default=1.0, help="all intervals are that many times as long")
    parser.add_argument("--cluster", action="store_true", help="a Cluster of three nodes instead of one server")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found: dict[str, float] = defaultdict(float, load_before=os.getloadavg()[0])
    with servers(args.cluster) as (url, node):
        for name in args.patterns:
            for workers in args.workers:
                measured = asyncio.run(measure(url, node, replace(PATTERNS[name], stretch=args.stretch), workers, args.seconds))
                show(name, measured)
                found |= figures(name, measured)
        if args.model:
            traffics = [replace(each, stretch=args.stretch) for each in MODEL]
            split = model([asyncio.run(measure(url, node, each, args.model, args.seconds)) for each in traffics])
            print("\n" + "\n".join(f"{name:<34} {cost:8.0f}" for name, cost in split.items()))
            found |= split
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
