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
from pathlib import Path

from gpu_bench_parts.goals import DECODED, GOALS, TRAINED
from gpu_check import flat, lines_of, write
from gpu_checks.packages import missing
from gpu_checks.runner import Check, Figure, Result, Runner, environment

REPOSITORY = Path(__file__).resolve().parents[1]
BUDGET_S = 1500.0
"""Time for all measurements together; those that have not begun by then are skipped."""

DECODING, DELTAS, HOST_PATH, OVERLAP, PUSHES, SAMPLING, TRAINING, TURNOVER = (
    f"gpu_bench_parts.{name}"
    for name in ("decoding", "deltas", "host_path", "overlap", "pushes", "sampling", "training", "turnover")
)
TWICE = "a model that a dry run has measured in another size"
DECODING_S = {"0.6B": 40, "1.7B": 35, "4B": 45, "8B": 60}
TRAINING_S = {"0.6B": 40, "1.7B": 40, "4B": 70}


def _decode(size: str) -> Check:
    is_twice = size != next(iter(DECODED))
    return Check(
        name=f"decode {size}", module=DECODING, limit_s=240, gpu_only=TWICE if is_twice else "", about_s=DECODING_S[size]
    )


def _train(size: str, recompute: str) -> Check:
    is_twice = (size, recompute) != TRAINED[0]
    return Check(
        name=f"train {size} {recompute}", module=TRAINING, limit_s=200, gpu_only=TWICE if is_twice else "",
        about_s=TRAINING_S[size],
    )  # fmt: skip


MEASUREMENTS = (
    Check(name="environment", module="gpu_checks.machine_checks", limit_s=90, about_s=40),
    Check(name="ceilings", module="gpu_checks.machine_checks", limit_s=60, about_s=7),
    _decode("0.6B"),
    Check(name="async scheduling", module=DECODING, limit_s=120, about_s=40),
    _train("0.6B", "none"),
    _decode("8B"),
    Check(name="swap 8B", module=DECODING, limit_s=120, gpu_only=TWICE, about_s=25),
    Check(name="turnover", module=TURNOVER, limit_s=120, about_s=40),
    Check(name="sampling", module=SAMPLING, limit_s=60, about_s=10),
    Check(name="host path", module=HOST_PATH, limit_s=180, about_s=80),
    Check(name="pushes", module=PUSHES, limit_s=300, about_s=120),
    _train("0.6B", "selective"),
    Check(name="lengths", module=TRAINING, limit_s=180, about_s=60),
    Check(name="gap", module=DECODING, limit_s=90, about_s=10),
    Check(name="delta", module=DELTAS, limit_s=120, about_s=7),
    Check(name="swap 0.6B", module=DECODING, limit_s=90, about_s=5),
    _decode("1.7B"),
    _decode("4B"),
    Check(name="overlap", module=OVERLAP, limit_s=420, about_s=400),
    *(_train(size, recompute) for size, recompute in TRAINED if size != "0.6B"),
)
"""In the order of what tells most: a budget that is too short cuts the last ones off."""


def page(figures: Mapping[str, Figure], when: str) -> str:
    """Return what was found as Markdown: goals, where the largest gap is, all figures."""
    is_dry = figures.get("environment.device") == "cpu"
    title = "Dry run on a CPU: no figure means anything" if is_dry else f"Measured on {figures.get('environment.gpu', 'a GPU')}"
    lines = [
        f"# {title}",
        "",
        f"{when}, `python benchmarks/gpu_bench.py`",
        "",
        "| what | measured | goal | short of it |",
        "|---|---|---|---|",
    ]
    gaps: dict[str, float] = {}
    for goal in GOALS:
        found = figures.get(goal.figure)
        sign = "at most" if goal.is_at_most else "at least"
        if isinstance(found, float):
            gaps[goal.what] = goal.shortfall(found)
        gap = gaps.get(goal.what, 1.0)
        lines.append(
            f"| {goal.what} | {_shown(found)} | {sign} {goal.wanted:g} | {f'{gap:.2g} x' if gap > 1 and not is_dry else ''} |"
        )
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
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help=f"time for all measurements ({BUDGET_S:.0f})")
    args = parser.parse_args()
    if absent := missing():
        print(f"not installed: {', '.join(absent)} (`make setup`, or docs/gpu.md for a machine without a package index)")
        return 1
    os.environ |= environment(args.device)
    chosen = [MEASUREMENTS[0], *(each for each in MEASUREMENTS[1:] if args.only is None or each.name in args.only)]
    print(f"about {-(-sum(each.about_s for each in chosen) // 60):.0f} minutes on an H200", flush=True)
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
