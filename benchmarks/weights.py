"""Measures a push of weights against one broadcast of the same bytes, a copy of them, and tensors sent one by one.

    python benchmarks/weights.py --rounds 9 --json result.json

Learner and workers are processes; the compared methods alternate in the same ones, and every ratio is the median over rounds of
two times measured one after the other. Messages go over pipes, not Redis, so that only the wire is measured. A push is timed
from the offer until every worker holds every byte verified; packing, hashing and the engine's copy are reported separately.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from weights_parts.fleet import Round, Way, fleet, only_warnings
from weights_parts.fleet_size import Cost, fitted
from weights_parts.in_flight import in_flight_figures
from weights_parts.models import scattered, transformer

from async_rl.config import WireConfig
from async_rl.supervision.liveness.leaving import leave_at_once

Figures = dict[str, float]
GLOO = WireConfig(shared_memory=False, deltas="off")
MEMORY = WireConfig()


def ways(mib: int) -> list[Way]:
    large, few, many = (partial(transformer, mib), partial(scattered, 2 * mib), partial(scattered, 16 * mib))
    return [
        Way(name="gloo", model=large, wire=GLOO, rival="flat"),
        Way(name="memory", model=large, wire=MEMORY, rival="flat"),
        Way(name="copy", model=large, wire=MEMORY, rival="copy"),
        Way(name="small", model=few, wire=GLOO, rival="one_by_one"),
        Way(name="many_small", model=many, wire=GLOO, rival="one_by_one"),
    ]


async def rounds_of(ways: Sequence[Way], workers: int, rounds: int) -> dict[str, list[Round]]:
    found: dict[str, list[Round]] = {way.name: [] for way in ways}
    async with fleet(ways, workers) as learners:
        for number in range(-1, rounds):  # the first round builds the groups and warms everything up
            for way in ways:
                one = await learners[way.name].round(workers)
                if number >= 0:
                    found[way.name].append(one)
    return found


def median(rounds: Sequence[Round], figure: Callable[[Round], float]) -> float:
    return statistics.median(figure(each) for each in rounds)


def advantage(rounds: Sequence[Round]) -> float:
    """Median speed-up over the rival."""
    return median(rounds, lambda each: each.rival_s / each.push_s)


def speed_figures(mib: int, workers: int, rounds: int) -> Figures:
    found = asyncio.run(rounds_of(ways(mib), workers, rounds))
    gloo, memory, copy, small, many = (found[name] for name in ("gloo", "memory", "copy", "small", "many_small"))
    figures = {
        "push_vs_flat_gloo": advantage(gloo),
        "same_host_vs_gloo": advantage(memory),
        "same_host_vs_memcpy": advantage(copy),
        "small_tensors_vs_naive": advantage(small),
        "many_small_tensors_vs_naive": advantage(many),
        "flat_gloo_gb_s": median(gloo, lambda each: each.num_bytes / each.rival_s / 1e9),
        "memcpy_gb_s": median(copy, lambda each: each.num_bytes / each.rival_s / 1e9),
        "naive_gb_s": median(small, lambda each: each.num_bytes / each.rival_s / 1e9),
    }
    for name, each in (("gloo", gloo), ("memory", memory), ("small", small), ("many_small", many)):
        figures[f"{name}_push_gb_s"] = median(each, lambda one: one.num_bytes / one.push_s / 1e9)
        figures[f"{name}_pack_gb_s"] = median(each, lambda one: one.num_bytes / one.pack_s / 1e9)
        figures[f"{name}_digest_gb_s"] = median(each, lambda one: one.num_bytes / one.digest_s / 1e9)
        figures[f"{name}_swap_gb_s"] = median(each, lambda one: one.num_bytes / one.swap_s / 1e9)
    return figures


def fleet_figures(sizes: Sequence[int], mib: int, rounds: int) -> tuple[Figures, Cost]:
    """Pushes to fleets of different sizes, all of them on this machine."""
    tiny, large = partial(scattered, 4, 1), partial(transformer, mib)
    ways = [
        Way(name="messages", model=tiny, wire=MEMORY),
        Way(name="gloo", model=large, wire=GLOO, rival="flat"),
        Way(name="memory", model=large, wire=MEMORY),
    ]
    figures: Figures = {}
    for size in sizes:
        found = asyncio.run(rounds_of(ways, size, rounds))
        figures |= {f"{name}_push_ms_{size}": 1e3 * median(each, lambda one: one.push_s) for name, each in found.items()}
        figures[f"push_vs_flat_gloo_{size}"] = advantage(found["gloo"])
    return figures, fitted({size: figures[f"messages_push_ms_{size}"] / 1e3 for size in sizes})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--fleets", type=int, nargs="*", default=[1, 2, 4, 8], help="numbers of workers; none to leave out")
    parser.add_argument("--no-decoding", action="store_true", help="leave out what a decoding engine feels of pushes")
    parser.add_argument("--deltas", type=Path, nargs="?", const=Path(), help="recorded by real_deltas.py; no folder: train now")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    only_warnings()
    figures = speed_figures(args.mib, 1, args.rounds)
    show("to one worker", figures)
    with_two = {f"{name}_3_processes": value for name, value in speed_figures(args.mib, 2, args.rounds).items()}
    show("to two", with_two)
    figures |= with_two
    if args.fleets:
        found, cost = fleet_figures(args.fleets, args.mib // 4, args.rounds)
        show("to more, all on this machine", found)
        print(f"\na model, not a measurement: {cost.explained()}")
        figures |= found | cost.figures()
    if not args.no_decoding:
        found = in_flight_figures(args.rounds, MEMORY)
        show("while an engine decodes", found)
        over_gloo = {f"{name}_gloo": value for name, value in in_flight_figures(args.rounds, GLOO).items()}
        show("the same over gloo", over_gloo)
        figures |= found | over_gloo
    if args.deltas is not None:
        from weights_parts.delta_figures import delta_figures

        found = delta_figures(args.deltas if args.deltas != Path() else None)
        show("as deltas", found)
        figures |= found
    if args.json is not None:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


def show(title: str, figures: Figures) -> None:
    print(f"\n{title}")
    for name, value in figures.items():
        print(f"  {name:36} {value:.3g}")


if __name__ == "__main__":
    with leave_at_once():  # a receiver's thread may still wait for a learner that was killed
        main()
