"""The compared packers: lengths in, bins of every shard and CPU milliseconds out."""

from __future__ import annotations

import json
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rivals import virtual_env

from learner.packing.cost import TYPICAL
from learner.packing.planner import Bins, plan
from packing_parts import textbook
from packing_parts.measure import CAPACITY, Lengths, dealt

Plan = tuple[float, list[Bins]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    name: str
    plan: Callable[[Lengths, int], Plan]
    most: int
    """The most sequences that it packs within seconds."""
    least_shards: int = 1
    """The fewest shards: with fewer it takes minutes."""

    def can(self, count: int, num_shards: int) -> bool:
        return count <= self.most and num_shards >= self.least_shards


def ours(lengths: Lengths, num_shards: int) -> Plan:
    return _timed(lambda: plan(lengths, CAPACITY, num_shards))


def plain(pack: Callable[[Sequence[int], int], Bins]) -> Callable[[Lengths, int], Plan]:
    def side(lengths: Lengths, num_shards: int) -> Plan:
        numbers = lengths.tolist()
        return _timed(lambda: dealt(pack(numbers, CAPACITY), num_shards))

    return side


def karmarkar_karp(lengths: Lengths, num_shards: int) -> Plan:
    numbers, costs = lengths.tolist(), TYPICAL.of(lengths).tolist()
    return _timed(lambda: textbook.karmarkar_karp_shards(numbers, costs, CAPACITY, num_shards))


def _timed(act: Callable[[], list[Bins]]) -> Plan:
    started = time.process_time()
    made = act()
    return 1e3 * (time.process_time() - started), made


SIDES = (
    Side(name="ours", plan=ours, most=65536),
    Side(name="next_fit", plan=plain(textbook.next_fit), most=65536),
    Side(name="first_fit_decreasing", plan=plain(textbook.first_fit_decreasing), most=4096),
    Side(name="best_fit_decreasing", plan=plain(textbook.best_fit_decreasing), most=65536),
    Side(name="karmarkar_karp", plan=karmarkar_karp, most=4096, least_shards=8),
)


class Absent(Exception):
    """TRL cannot be measured; the message gives the reason."""


class Trl:
    """TRL's packer in a process that lives for the whole benchmark, because importing it is slow."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.side = Side(name="trl", plan=self._plan, most=4096)

    def _plan(self, lengths: Lengths, num_shards: int) -> Plan:
        answer = self.ask(lengths, columns=False)
        indices: dict[int, list[int]] = defaultdict(list)
        for index, length in enumerate(lengths.tolist()):
            indices[length].append(index)
        return answer["ms"], dealt([[indices[length].pop() for length in members] for members in answer["bins"]], num_shards)

    def ask(self, lengths: Lengths, *, columns: bool) -> dict[str, Any]:
        assert self._process.stdin is not None
        asked = {"lengths": lengths.tolist(), "capacity": CAPACITY, "columns": columns}
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return self.answer()

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise Absent(f"TRL's packer ended with exit code {self._process.wait()}")
        return json.loads(line)


@contextmanager
def open_trl() -> Iterator[Trl]:
    try:
        python = virtual_env.python_of("trl")
    except subprocess.CalledProcessError as error:
        raise Absent(f"TRL cannot be installed here: pip ended with code {error.returncode}") from None
    command = [python, virtual_env.RIVALS / "trl_packing.py"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        trl = Trl(process)
        trl.answer()
        yield trl
