"""Measure decoding, training and swaps of weights on one GPU, each beside its goal.

usage: python benchmarks/gpu_bench.py [--device auto|cpu|cuda] [--only NAME ...] [--to FOLDER] [--budget-s SECONDS]

Writes NAME.json and NAME.md after every measurement: into benchmarks/results/ on a GPU. Without one it is a dry run of the same
code with tiny sizes, whose figures mean nothing; it is called so, and goes to runs/gpu_bench_dry_run/.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpu_check import flat, lines_of, write
from gpu_checks.packages import missing
from gpu_checks.runner import Check, Figure, Result, Runner, environment

REPOSITORY = Path(__file__).resolve().parents[1]
DECODING, DELTAS, HOST_PATH, OVERLAP, TRAINING = (
    f"gpu_bench_parts.{name}" for name in ("decoding", "deltas", "host_path", "overlap", "training")
)
TWICE = "a model that a dry run has measured in another size"
MEASUREMENTS = (
    Check(name="environment", module="gpu_checks.machine_checks", limit_s=90),
    Check(name="ceilings", module="gpu_checks.machine_checks", limit_s=60),
    Check(name="decode", module=DECODING, limit_s=240),
    Check(name="train 0.6B none", module=TRAINING, limit_s=150),
    Check(name="train 0.6B selective", module=TRAINING, limit_s=150, gpu_only=TWICE),
    Check(name="lengths", module=TRAINING, limit_s=180),
    Check(name="swap", module=DECODING, limit_s=90),
    Check(name="gap", module=DECODING, limit_s=90),
    Check(name="delta", module=DELTAS, limit_s=120),
    Check(name="host path", module=HOST_PATH, limit_s=180),
    Check(name="overlap", module=OVERLAP, limit_s=420),
    *(
        Check(name=f"train {size} {recompute}", module=TRAINING, limit_s=200, gpu_only=TWICE)
        for size in ("1.7B", "4B")
        for recompute in ("selective", "none")
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    what: str
    figure: str
    """CHECK.FIGURE in the JSON."""
    wanted: float
    is_at_most: bool = False

    def shortfall(self, found: float) -> float:
        """Return how many times too small, or too large, the figure is; at most 1: the goal is met."""
        return found / self.wanted if self.is_at_most else self.wanted / max(found, 1e-12)


GOALS = (
    Goal(what="decoding at its best batch, share of the copy's bandwidth", figure="decode.best_of_copy_bandwidth", wanted=0.75),
    *(
        Goal(
            what=f"training {size}, rows of 32k, recompute {recompute}, MFU",
            figure=f"train_{size}_{recompute}.mfu",
            wanted=0.45,
        )
        for size in ("0.6B", "1.7B", "4B")
        for recompute in ("none", "selective")
    ),
    Goal(what="tokens/s of uneven lengths over equal ones", figure="lengths.uneven_over_equal", wanted=0.97),
    Goal(what="swap of weights on the device, TB/s", figure="swap.swap_tb_s", wanted=1.5),
    Goal(what="decoding waits for a swap, ms at most", figure="swap.worst_swap_ms", wanted=20, is_at_most=True),
    Goal(what="deltas of a parcel on the device, share of the copy's bandwidth", figure="delta.of_copy_bandwidth", wanted=0.7),
    Goal(what="deltas at learning rate 1e-6, times smaller than the weights", figure="delta.times_smaller", wanted=100),
    Goal(
        what="synchronous over asynchronous runs, time of a step on one device",
        figure="overlap.synchronous_over_asynchronous",
        wanted=1.25,
    ),
    Goal(what="host path: share of training without a kernel", figure="host_path.gpu_idle", wanted=0.02, is_at_most=True),
    Goal(what="host path: reading and packing hidden behind training", figure="host_path.hidden", wanted=0.95),
    Goal(
        what="log-probabilities of engine and learner, mean difference in nats", figure="gap.mean", wanted=1e-3, is_at_most=True
    ),
)


def page(figures: Mapping[str, Figure], when: str) -> str:
    """Return what was found as Markdown: goals, where the largest gap is, all figures."""
    is_dry = figures.get("environment.device") == "cpu"
    title = "Dry run on a CPU: no figure means anything" if is_dry else f"Measured on {figures.get('environment.gpu', 'a GPU')}"
    lines = [f"# {title}", "", f"{when}, `python benchmarks/gpu_bench.py`", "", "| what | measured | goal |", "|---|---|---|"]
    gaps: dict[str, float] = {}
    for goal in GOALS:
        found = figures.get(goal.figure)
        sign = "at most" if goal.is_at_most else "at least"
        lines.append(f"| {goal.what} | {_shown(found)} | {sign} {goal.wanted:g} |")
        if isinstance(found, float):
            gaps[goal.what] = goal.shortfall(found)
    if gaps and not is_dry:
        worst = max(gaps, key=lambda what: gaps[what])
        lines += ["", f"Worst gap: {worst}, {gaps[worst]:.2g} x short." if gaps[worst] > 1 else "Every measured goal is met."]
    lines += ["", "| figure | value |", "|---|---|"]
    return "\n".join(
        [*lines, *(f"| `{name}` | {_shown(value)} |" for name, value in figures.items() if "\n" not in str(value)), ""]
    )


def _shown(value: Figure | None) -> str:
    if value is None:
        return "not measured"
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "/")


def folder_of(results: Sequence[Result]) -> Path:
    is_dry = results[0].figures.get("device") == "cpu"
    return REPOSITORY / ("runs/gpu_bench_dry_run" if is_dry else "benchmarks/results")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    names = [check.name for check in MEASUREMENTS[1:]]
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=names, help="these measurements alone")
    parser.add_argument("--to", type=Path, help="a folder (benchmarks/results; of a dry run, runs/gpu_bench_dry_run)")
    parser.add_argument("--budget-s", type=float, default=1500, help="time for all measurements (1500)")
    args = parser.parse_args()
    if absent := missing():
        print(f"not installed: {', '.join(absent)} (`make setup`, or docs/gpu.md for a machine without a package index)")
        return 1
    os.environ |= environment(args.device)
    chosen = [MEASUREMENTS[0], *(each for each in MEASUREMENTS[1:] if args.only is None or each.name in args.only)]
    results: list[Result] = []
    when = time.strftime("%Y-%m-%dT%H-%M-%SZ", time.gmtime())
    for result in Runner(device=args.device, budget_s=args.budget_s).run_all(chosen):
        results.append(result)
        print("\n".join(lines_of(result)), flush=True)
        folder = args.to if args.to is not None else folder_of(results)
        gpu = re.sub(r"\W+", "-", str(results[0].figures.get("gpu", "dry run on a cpu"))).lower()
        write(folder / f"{when}-{gpu}.json", results)
        (folder / f"{when}-{gpu}.md").write_text(page(flat(results), when))
    failed = [result.name for result in results if result.outcome == "failed"]
    print(f"failed: {', '.join(failed)}" if failed else f"nothing failed; kept in {folder}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
