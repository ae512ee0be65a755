"""Speed and quality of packing: this planner, TRL's packer and textbook algorithms.

    python benchmarks/packing.py --rounds 7 --json result.json

Every packer packs the same lengths in every round. Times are CPU times on one core, medians over the rounds; the quality of a
packing is the same in every round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import numpy as np
from packing_parts.materialise import copied_ms, groups_of, packed_ms
from packing_parts.measure import CAPACITY, Lengths, Worth, drawn, worth
from packing_parts.sides import SIDES, Absent, Side, Trl, open_trl

KINDS = ("lognormal", "uniform", "bimodal")
ROLLOUTS = 256
SEED = 5
Figures = dict[str, float]


def compare(sides: Sequence[Side], lengths: Lengths, num_shards: int, rounds: int) -> tuple[dict[str, float], dict[str, Worth]]:
    """Return median milliseconds and the quality of the packings."""
    ms: dict[str, list[float]] = defaultdict(list)
    found: dict[str, Worth] = {}
    for number in range(-1, rounds):  # the first round is a warm-up
        for side in sides:
            spent, shards = side.plan(lengths, num_shards)
            if number >= 0:
                ms[side.name].append(spent)
            else:
                found[side.name] = worth(shards, lengths)
    return {name: statistics.median(each) for name, each in ms.items()}, found


def show(kind: str, count: int, num_shards: int, ms: dict[str, float], found: dict[str, Worth]) -> None:
    bound = found["ours"].bins - found["ours"].above_bound
    print(f"\n{count} {kind} lengths, capacity {CAPACITY}, {num_shards} shard(s), at least {bound} bins")
    print(f"{'':22}{'ms':>9}{'fill':>7}{'bins':>8}{'over':>6}{'cost':>8}{'lock-step':>11}")
    for name, spent in ms.items():
        side = found[name]
        more = f"{side.above_bound:+d}"
        print(f"{name:22}{spent:9.2f}{side.fill:7.3f}{more:>8}{side.over_capacity:6d}{side.cost:8.4f}{side.lock_step:11.4f}")


def materialise(trl: Trl | None, rounds: int) -> Figures:
    """Measure millions of tokens per second from rollouts to columns."""
    lengths = drawn("lognormal", ROLLOUTS, SEED)
    groups = groups_of(lengths, SEED)
    ms: dict[str, list[float]] = defaultdict(list)
    for number in range(-1, rounds):
        spent, batch = packed_ms(groups)
        turn = {"ours": spent, "copy": copied_ms(batch)}
        if trl is not None:
            turn["trl"] = trl.ask(lengths, columns=True)["ms"]
        if number >= 0:
            for name, each in turn.items():
                ms[name].append(each)
    tokens = int(np.sum(lengths))
    found = {f"{name}_materialise_mtok_s": tokens / statistics.median(each) / 1e3 for name, each in ms.items()}
    print(f"\n{ROLLOUTS} rollouts, {tokens / 1e6:.2f} million tokens, packed and copied into columns")
    for name, figure in found.items():
        print(f"{name:30}{figure:9.1f}")
    return found


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--counts", type=int, nargs="+", default=[256, 4096, 65536], help="sequences")
    parser.add_argument("--shards", type=int, nargs="+", default=[1, 8], help="data-parallel ranks")
    parser.add_argument("--rival", action=argparse.BooleanOptionalAction, default=True, help="also run TRL (default: yes)")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error("--rounds must be at least 1")
    return args


def main() -> None:
    args = parse_args()
    figures: Figures = {"rounds": args.rounds, "load_before": os.getloadavg()[0]}
    with ExitStack() as stack:
        trl = None
        if args.rival:
            try:
                trl = stack.enter_context(open_trl())
            except Absent as reason:
                print(f"not measured: {reason}", file=sys.stderr)
        all_sides = [*SIDES, trl.side] if trl is not None else list(SIDES)
        for count in args.counts:
            for kind in KINDS:
                lengths = drawn(kind, count, SEED)
                for num_shards in args.shards:
                    sides = [side for side in all_sides if side.can(count, num_shards)]
                    ms, found = compare(sides, lengths, num_shards, args.rounds)
                    show(kind, count, num_shards, ms, found)
                    for name, spent in ms.items():
                        where = f"{name}_{kind}_{count}_dp{num_shards}"
                        figures[f"{where}_ms"] = spent
                        figures |= {f"{where}_{measure}": value for measure, value in asdict(found[name]).items()}
        figures |= materialise(trl, args.rounds)
    if args.json:
        args.json.write_text(json.dumps(figures | {"numpy": version("numpy")}, indent=2) + "\n")


if __name__ == "__main__":
    main()
