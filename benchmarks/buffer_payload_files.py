"""Compares the round trip with payloads in Redis, in /dev/shm and on a disk, and with Reverb.

    python benchmarks/buffer_payload_files.py --rounds 5 --json result.json

Two writers and one reader, each in its own process, run the whole protocol: reserve, commit, take exactly once within
a window of versions, issue, publish, release, checkpoint, sweep. Groups hold 8 rollouts. Every variant runs in every
round; medians over the rounds are reported.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

from buffer_parts.groups import group, under
from buffer_parts.rival import RIVALS, Absent, rival_per_s
from buffer_parts.server import server
from rivals.rollouts import Portions, rollouts_per_s

from async_rl.replay_protocol import Limits
from async_rl.types import VersionRecord
from buffer.payloads.files import PayloadFolder
from buffer.redis_buffer import RedisBuffer
from buffer.server.client import Server

RUN = "benchmark"
WRITERS = 2
GROUPS_PER_STEP = 64
LIMITS = Limits(max_age=2, groups_per_step=GROUPS_PER_STEP, lease_s=60, max_attempts=3, selector="windowed_fifo")
MAX_BYTES = 4 * 2**30
TICKETS_AT_ONCE = 4
ANY_VERSION = 2**31
"""The version that workers report: never behind the live one."""
WAIT_S = 60.0
SIDES = {"redis": None, "shm": Path("/dev/shm"), "disk": Path("runs")}
"""Where each of our variants keeps its payloads."""


def round_trip_per_s(parent: Path | None, tokens: int, groups: int) -> float:
    with ExitStack() as stack:
        where = stack.enter_context(server())
        folder = (
            Path(stack.enter_context(tempfile.TemporaryDirectory(dir=parent, prefix="arl"))) if parent is not None else None
        )
        sides = partial(_write, folder), partial(_read, folder)
        return rollouts_per_s(*sides, where, tokens=tokens, groups=groups, writers=WRITERS)


def _write(folder: Path | None, where: str, name: str, tokens: int, portions: Portions) -> None:
    asyncio.run(_commit_all(folder, where, name, tokens, portions))


def _read(folder: Path | None, where: str, tokens: int, portions: Portions) -> None:
    asyncio.run(_train_all(folder, where, tokens, portions))


@asynccontextmanager
async def _opened(folder: Path | None, where: str) -> AsyncIterator[RedisBuffer]:
    connection = Server(where)
    with ExitStack() as stack:
        payload_folder = stack.enter_context(PayloadFolder(folder, max_bytes=MAX_BYTES)) if folder is not None else None
        yield RedisBuffer(connection, RUN, payload_folder=payload_folder)
    await connection.close()


async def _commit_all(folder: Path | None, where: str, name: str, tokens: int, portions: Portions) -> None:
    rolled_out = group(tokens, seed=0)
    async with _opened(folder, where) as buffer:
        for count in portions:
            left = count
            while left > 0:
                wanted = min(left, TICKETS_AT_ONCE)
                for ticket in await buffer.reserve(name, version=ANY_VERSION, count=wanted, wait_s=WAIT_S):
                    assert await buffer.commit(name, under(ticket, rolled_out, name)) == "stored"
                    left -= 1


async def _train_all(folder: Path | None, where: str, tokens: int, portions: Portions) -> None:
    async with _opened(folder, where) as buffer:
        fence = await buffer.acquire("benchmark", LIMITS)
        await buffer.recover(fence, None)
        version, step = await _publish(buffer, fence, step=0, after=-1), 0
        for count in portions:
            for _ in range(count // GROUPS_PER_STEP):
                step += 1
                taken = await buffer.take(fence, step=step, version=version, num_groups=GROUPS_PER_STEP, wait_s=WAIT_S)
                assert len(taken) == GROUPS_PER_STEP
                assert all(len(rollout.samples[0]) == tokens for one in taken for rollout in one.group.rollouts)
                version = await _publish(buffer, fence, step=step, after=version)
                await buffer.release(fence, step)
                await buffer.checkpoint(fence, step)


async def _publish(buffer: RedisBuffer, fence: int, *, step: int, after: int) -> int:
    version = await buffer.issue(fence, after=after)
    await buffer.publish(fence, VersionRecord(version=version, timeline="benchmark", step=step, digest=""))
    return version


def _reverb_per_s(tokens: int, groups: int) -> float:
    [reverb] = [rival for rival in RIVALS if rival.name == "reverb"]
    return rival_per_s(reverb, tokens, groups)


def measure(tokens: int, groups: int, rounds: int, *, with_reverb: bool) -> dict[str, float | None]:
    sides: dict[str, Callable[[], float]] = {
        name: partial(round_trip_per_s, parent, tokens, groups) for name, parent in SIDES.items()
    }
    if with_reverb:
        sides["reverb"] = partial(_reverb_per_s, tokens, groups)
    found: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, run in sides.items():
            try:
                found[name].append(run())
            except Absent as reason:
                print(reason)
    return {name: statistics.median(rates) if rates else None for name, rates in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384, help="of a rollout; default 16384")
    parser.add_argument("--groups", type=int, default=256, help="per round and side, a multiple of 64; default 256")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-reverb", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    SIDES["disk"].mkdir(exist_ok=True)
    load = os.getloadavg()[0]
    rates = measure(args.tokens, args.groups, args.rounds, with_reverb=not args.no_reverb)
    for name, rate in rates.items():
        print(f"{name:8s} {rate:8.0f} rollouts/s of {args.tokens} tokens" if rate is not None else f"{name:8s}   absent")
    if args.json is not None:
        figures = {f"arena_{name}_per_s": rate for name, rate in rates.items()}
        args.json.write_text(
            json.dumps(figures | {"tokens": args.tokens, "rounds": args.rounds, "load_before": load}, indent=1)
        )


if __name__ == "__main__":
    main()
