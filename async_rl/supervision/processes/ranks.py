"""The parent of ranks that share one machine: python -m async_rl.supervision.processes.ranks RANKS LOGS MODULE ARGUMENTS...

RANKS is their number, or 8+4/16: four of sixteen, from rank 8 on; the others are on other machines. Ranks that are all here
rendezvous over a file in memory, without a port. The first rank writes to the terminal, the others to LOGS. When one rank
ends, the others are ended too, and its exit code becomes the group's.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from async_rl.durable.private_files import keep_files_private
from async_rl.supervision.liveness.sign_of_life import signs_of_life
from async_rl.supervision.processes.children import Child, ChildSpec
from async_rl.supervision.processes.restarting import FatalExit, how_it_ended
from async_rl.supervision.processes.restarts import RestartPolicy
from async_rl.supervision.processes.signals import drain_on_signals

STORE_VARIABLE = "ASYNC_RL_RANKS_STORE"
"""Path of the file over which ranks on one machine rendezvous (torch's FileStore)."""
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", STORE_VARIABLE)
"""Environment variables that make a process one of several ranks."""

LEFT_ALONE_S = 5.0
"""Seconds that ranks get to end by themselves after one ended, so that they can report why."""
TERMINATION_S = 5.0
"""Seconds between SIGTERM and SIGKILL for ranks that did not."""
LINES_SHOWN = 30

_LOOPBACK = "lo" if sys.platform == "linux" else "lo0"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRange:
    """The ranks that one machine starts, out of `world`."""

    first: int = 0
    count: int
    world: int

    @classmethod
    def parse(cls, text: str) -> RankRange:
        if "/" not in text:
            return cls(count=int(text), world=int(text))
        own, _, world = text.partition("/")
        first, _, count = own.partition("+")
        return cls(first=int(first), count=int(count), world=int(world))

    def __str__(self) -> str:
        return str(self.count) if self.is_whole else f"{self.first}+{self.count}/{self.world}"

    @property
    def is_whole(self) -> bool:
        return self.count == self.world


@contextmanager
def open_store() -> Generator[tuple[str, Sequence[int]]]:
    """Yield the path of the file over which the ranks rendezvous, and the descriptors that they must inherit for it.

    On Linux the file is in memory and has no name: a parent that is killed leaves nothing behind, no other user can open it,
    and it needs no file system with locks, which the run's folder may lack if it is on the network.
    """
    if hasattr(os, "memfd_create"):
        number = os.memfd_create("async-rl-ranks", os.MFD_CLOEXEC)
        try:
            yield f"/proc/self/fd/{number}", (number,)
        finally:
            os.close(number)
    else:
        with TemporaryDirectory(prefix="async-rl-ranks-") as folder:  # of mode 0700
            yield f"{folder}/store", ()


def specs(
    command: Sequence[str], ranks: RankRange, *, store: str, inherits: Sequence[int], logs: Path, inherited: Mapping[str, str]
) -> list[ChildSpec]:
    """One child process per rank. With ranks on other machines, they rendezvous elsewhere than in the file `store`."""
    group = {"WORLD_SIZE": str(ranks.world), "LOCAL_WORLD_SIZE": str(ranks.count)}
    shared = {**inherited, **group}
    if ranks.is_whole:
        shared = {"GLOO_SOCKET_IFNAME": _LOOPBACK, **shared, STORE_VARIABLE: store}
    return [
        ChildSpec(
            name=f"rank {rank}",
            command=command,
            environment={**shared, "RANK": str(rank), "LOCAL_RANK": str(place)},
            log=logs / f"rank-{rank}.log" if place > 0 else None,
            policy=RestartPolicy(limit=0),  # only the group as a whole is restarted, by its supervisor
            inherits=inherits,
        )
        for place, rank in enumerate(range(ranks.first, ranks.first + ranks.count))
    ]


class RankProcesses:
    """Runs all ranks once. When `stop` is set, all get SIGTERM; rank 0 decides how the group drains."""

    def __init__(self, specs: Sequence[ChildSpec]) -> None:
        self._children = [Child(spec, on_start=lambda _name, _pid: None) for spec in specs]
        self._statuses: dict[int, int] = {}
        """Exit statuses in the order in which the ranks ended."""
        self._breaks_up = asyncio.Event()

    async def run(self, stop: asyncio.Event) -> int:
        """Return the exit code of the rank that failed first (128 + N for signal N), 0 if none failed."""
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(self._keep(rank)) for rank in range(len(self._children))]
            stopping = tasks.create_task(self._end_on(stop))
            await self._breaks_up.wait()
            if self._statuses.get(0, 0) == 0:
                await asyncio.wait(running, timeout=LEFT_ALONE_S)
            failures = {rank: status for rank, status in self._statuses.items() if status != 0}
            stopping.cancel()
            self._terminate()
            await asyncio.wait(running, timeout=TERMINATION_S)
            for child in self._children:
                child.kill()
        for rank, status in failures.items():
            self._explain(rank, status)
            return status if status > 0 else 128 - status
        return 0

    async def _keep(self, rank: int) -> None:
        try:
            status = await self._children[rank].supervise()
        except FatalExit as fatal:
            status = fatal.status
        self._statuses[rank] = status
        if rank == 0 or status != 0:
            self._breaks_up.set()

    async def _end_on(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self._terminate()

    def _terminate(self) -> None:
        for child in self._children:
            child.terminate()

    def _explain(self, rank: int, status: int) -> None:
        """Print why a rank failed, unless rank 0 ended in the same way and has printed it."""
        if self._statuses[0] == status:
            return
        child = self._children[rank]
        print(f"{child.spec.name} of {len(self._children)} {how_it_ended(status)}", file=sys.stderr)
        if tail := child.last_lines(LINES_SHOWN):
            print(f"The last lines of {child.spec.log}:", *(f"  {line}" for line in tail), sep="\n", file=sys.stderr)


async def run(ranks: RankRange, logs: Path, command: Sequence[str], inherited: Mapping[str, str]) -> int:
    keep_files_private()
    stop = drain_on_signals()
    with open_store() as (store, inherits):
        return await RankProcesses(specs(command, ranks, store=store, inherits=inherits, logs=logs, inherited=inherited)).run(
            stop
        )


if __name__ == "__main__":
    _, how_many, where, *module = sys.argv
    with signs_of_life(os.environ):
        sys.exit(asyncio.run(run(RankRange.parse(how_many), Path(where), [sys.executable, "-P", "-m", *module], os.environ)))
