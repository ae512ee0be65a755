"""Measures the replay buffer: codec, round trip beside rivals and the server's limit, scripts, growth.

    python benchmarks/buffer_speed.py --rounds 5 --json result.json

A round trip carries rollouts of 2,048 or 16,384 tokens, in groups of 8, from writers in their own processes to arrays in
a reader. Ours reserves, commits, takes exactly once within a window of versions, issues, publishes, releases and checkpoints;
the rivals move bytes. Every side runs in every round; the medians over the rounds are reported.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from buffer_parts.codec import codec_us
from buffer_parts.flatness import FEW_WRITERS, MANY_WRITERS, SCRIPTS, script_us_by_groups, server_us_by_writers
from buffer_parts.limit import limits_per_s
from buffer_parts.rehearsal import script_us
from buffer_parts.rival import RIVALS, Absent, Rival, rival_per_s
from buffer_parts.round_trip import GROUPS_PER_STEP, round_trip_per_s
from buffer_parts.script_log import script_names
from buffer_parts.tables import Figures, plain_table, script_table, transport_table
from end_to_end import keep_to_cores
from rivals.rollouts import GROUP

PARTS = ("codec", "transport", "scripts", "flatness")
SIZES = {"2k": 2048, "16k": 16384}
LIMITS = ("redis_limit", "redis_limit_grouped")
FLAT_SCRIPTS = ("commit", "take", "reserve", "stats")


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """The amounts to measure."""

    groups: dict[str, int]
    """Groups of a round trip, by size of the rollouts; enough for a second or two."""
    steps: int
    """Steps in which the scripts are called."""
    sizes: tuple[int, int]
    """Numbers of groups in the buffer, to see which costs grow."""


FULL = Effort(groups={"2k": 1024, "16k": 256}, steps=20, sizes=(1_000, 1_000_000))
QUICK = Effort(groups={"2k": 64, "16k": 64}, steps=2, sizes=(100, 2_000))


# -- the parts, each once: figures by name, and a printed table --------------------------------------------------------
def codec_round(_: Effort) -> Figures:
    found = codec_us()
    against = {f"codec_{name}_vs_memcpy": found[name] / found["memcpy"] for name in ("encode", "decode")}
    return {**{f"codec_{name}_4k_us": value for name, value in found.items()}, **against}


class Transport:
    """Measure one round of round trips; a rival that fails once is not tried again."""

    def __init__(self, rivals: Iterable[Rival]) -> None:
        self._rivals = list(rivals)
        self.absent: dict[str, str] = {}

    def round(self, effort: Effort) -> Figures:
        found: dict[str, float | None] = {}
        for size, tokens in SIZES.items():
            groups = effort.groups[size]
            found[f"round_trip_{size}_per_s"] = ours = round_trip_per_s(tokens, groups)
            for limit, per_s in zip(LIMITS, limits_per_s(tokens, GROUP * groups // 2), strict=True):
                found |= _compared(limit, size, ours, per_s)
            for rival in self._rivals:
                found |= _compared(rival.name, size, ours, self._try(rival, tokens, groups))
        return found

    def _try(self, rival: Rival, tokens: int, groups: int) -> float | None:
        if rival.name in self.absent:
            return None
        try:
            return rival_per_s(rival, tokens, max(groups // rival.share, GROUPS_PER_STEP))
        except Absent as why:
            self.absent[rival.name] = str(why)
            return None


def _compared(name: str, size: str, ours: float, theirs: float | None) -> dict[str, float | None]:
    return {f"{name}_{size}_per_s": theirs, f"round_trip_{size}_vs_{name}": None if theirs is None else ours / theirs}


def scripts_figures(effort: Effort, rounds: int) -> Figures:
    """Measure each script. Every round calls the scripts in the same order, so calls are compared one by one; the median over
    the rounds removes the machine's other load.
    """
    costs = [script_us(effort.steps) for _ in range(rounds)]
    found: dict[str, float | None] = {}
    for name in script_names():
        calls = [statistics.median(call) for call in zip(*(cost.get(name, []) for cost in costs), strict=False)]
        found[f"script_{name}_mean_ms"] = statistics.mean(calls) / 1e3 if calls else None
        found[f"script_{name}_max_ms"] = max(calls) / 1e3 if calls else None
    slowest = max(value for name, value in found.items() if name.endswith("_max_ms") and value is not None)
    return found | {"script_max_ms": slowest}


def writers_round(effort: Effort) -> Figures:
    by_writers = server_us_by_writers(effort.steps)
    against = by_writers[MANY_WRITERS] / by_writers[FEW_WRITERS]
    return {**{f"server_us_{writers}_writers": value for writers, value in by_writers.items()}, "flat_writers": against}


def groups_figures(effort: Effort) -> Figures:
    """Measure once only: filling a buffer with a million groups takes minutes, and each figure is a median."""
    by_groups = script_us_by_groups(effort.sizes)
    small, large = (by_groups[size] for size in effort.sizes)
    found: Figures = {f"{script}_us_{size}_groups": by_groups[size][script] for script in SCRIPTS for size in effort.sizes}
    return found | {"flat_groups": max(large[script] / small[script] for script in FLAT_SCRIPTS)}


# -- over the rounds ----------------------------------------------------------------------------------------------------
def medians(rounds: Sequence[Figures]) -> Figures:
    """Report the median of the ratios within each round: what slows a round down slows both of its sides."""
    found: dict[str, float | None] = {}
    for name in rounds[0]:
        values = [value for figures in rounds if (value := figures[name]) is not None]
        found[name] = statistics.median(values) if len(values) == len(rounds) else None
    return found


def repeated(part: Callable[[Effort], Figures], effort: Effort, rounds: int) -> Figures:
    return medians([part(effort) for _ in range(rounds)])


def measure(parts: Sequence[str], effort: Effort, rounds: int, rivals: Sequence[Rival]) -> Figures:
    found: dict[str, float | None] = {}

    def show(figures: Figures, table: str) -> None:
        found.update(figures)
        print(table, flush=True)

    if "codec" in parts:
        codec = repeated(codec_round, effort, rounds)
        show(codec, plain_table(codec))
    if "transport" in parts:
        transport = Transport(rivals)
        trips = repeated(transport.round, effort, rounds)
        show(trips, transport_table(trips, SIZES, [*LIMITS, *(rival.name for rival in rivals)]))
        for why in transport.absent.values():
            print(f"not measured: {why}\n")
    if "scripts" in parts:
        scripts = scripts_figures(effort, rounds)
        show(scripts, script_table(scripts, script_names()))
    if "flatness" in parts:
        growth = {**repeated(writers_round, effort, rounds), **groups_figures(effort)}
        show(growth, plain_table(growth))
    return found


# -- the command --------------------------------------------------------------------------------------------------------
def parse_args(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [rival.name for rival in RIVALS]
    parser.add_argument("--rounds", type=int, default=5, help="turns of every side; medians are reported (default: 5)")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {','.join(PARTS)} (default: all)")
    parser.add_argument("--rivals", default="all", help=f"none, all, or some of {','.join(names)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="little of everything: shows that it works, not how fast")
    parser.add_argument("--json", type=Path, help="where to write one flat object")
    args = parser.parse_args(words)
    args.parts = _chosen(parser, "--parts", args.parts, PARTS)
    chosen = {"none": "", "all": ",".join(names)}.get(str(args.rivals), str(args.rivals))
    args.rivals = [rival for rival in RIVALS if rival.name in _chosen(parser, "--rivals", chosen, names)]
    if args.rounds < 1:
        parser.error("--rounds must be at least 1")
    return args


def _chosen(parser: argparse.ArgumentParser, option: str, text: str, known: Sequence[str]) -> list[str]:
    chosen = [name for name in text.split(",") if name]
    for name in chosen:
        if name not in known:
            parser.error(f"{option}: there is no {name!r}; choose from {','.join(known)}")
    return chosen


def main() -> None:
    args = parse_args()
    logging.getLogger("buffer").setLevel(logging.CRITICAL)  # invalid groups are part of the rehearsal
    load = os.getloadavg()[0]
    keep_to_cores()
    found = measure(args.parts, QUICK if args.quick else FULL, args.rounds, args.rivals)
    if args.json is not None:
        args.json.write_text(json.dumps({**found, "rounds": args.rounds, "load_before": load}, indent=2) + "\n")


if __name__ == "__main__":
    main()
