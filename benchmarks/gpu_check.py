"""Run the code paths of training on the available device: what works, and how fast.

usage: python benchmarks/gpu_check.py [--device auto|cpu|cuda] [--only NAME ...] [--json PATH] [--budget-s SECONDS] [--cold]

Every check runs in a process of its own under a deadline, so that one that fails or hangs costs only itself. What tells most
comes first, and the JSON is written after every check. Without a GPU this is a dry run: the same paths on a CPU with tiny
sizes, two at a time, where the times mean nothing. Exits 1 if a check failed, or if a package of pyproject.toml is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from gpu_checks.packages import missing
from gpu_checks.runner import Check, Figure, Result, Runner, environment

BUDGET_S = 470.0
"""Time for all checks together; those that have not begun by then are skipped."""

ENGINE, GRAPHS, KERNELS, LEARNER, MODEL, OPTIMIZER, SHARING, WIRE = (
    f"gpu_checks.{name}_checks" for name in ("engine", "graph", "kernel", "learner", "model", "optimizer", "sharing", "wire")
)
CHECKS = (
    Check(name="environment", module="gpu_checks.machine_checks", limit_s=90),
    Check(name="ceilings", module="gpu_checks.machine_checks", limit_s=60),
    Check(name="varlen", module=KERNELS, limit_s=60),
    Check(name="sdpa", module=KERNELS, limit_s=60),
    Check(name="products", module=KERNELS, limit_s=60),
    Check(name="activation", module=KERNELS, limit_s=60),
    Check(name="compilers", module=KERNELS, limit_s=90, gpu_only="a kernel of Triton's"),
    Check(name="cuda ipc", module=WIRE, limit_s=90, gpu_only="CUDA's memory between processes"),
    Check(name="packing", module=MODEL, limit_s=60),
    Check(name="logprobs", module=ENGINE, limit_s=90),
    Check(name="graphs", module=GRAPHS, limit_s=90),
    Check(name="graphs async", module=GRAPHS, limit_s=90),
    Check(name="decode 0.6B", module=ENGINE, limit_s=120, gpu_only="a model of 0.6 B parameters"),
    Check(name="learn 0.6B", module=LEARNER, limit_s=120, gpu_only="training 0.6 B parameters"),
    Check(name="optimizer", module=OPTIMIZER, limit_s=60),
    Check(name="weight gradients", module=LEARNER, limit_s=60),
    Check(name="experts", module=MODEL, limit_s=60),
    Check(name="push in place", module=WIRE, limit_s=90),
    Check(name="push gloo", module=WIRE, limit_s=90),
    Check(name="push deltas", module=WIRE, limit_s=90),
    Check(name="push ranks", module="gpu_checks.rank_checks", limit_s=150),
    Check(name="rebuild", module=WIRE, limit_s=60),
    Check(name="swap", module=ENGINE, limit_s=90),
    Check(name="run", module="gpu_checks.run_checks", limit_s=150),
    Check(name="auto cache", module=SHARING, limit_s=90),
    Check(name="graphs experts", module=GRAPHS, limit_s=90),
    Check(name="offload", module=OPTIMIZER, limit_s=60),
    Check(name="mps", module=SHARING, limit_s=120, gpu_only="MPS"),
    Check(name="checkpoint", module=LEARNER, limit_s=60),
    Check(name="repeats", module=LEARNER, limit_s=60),
    Check(name="kv cache", module=ENGINE, limit_s=90),
    Check(name="learn small", module=LEARNER, limit_s=60),
    Check(name="decode small", module=ENGINE, limit_s=60),
)


def lines_of(result: Result) -> Iterator[str]:
    yield f"{result.name:<16} {result.outcome:<8} {result.seconds:6.1f} s  {result.reason}".rstrip()
    for name, value in result.figures.items():
        yield f"{'':<16}   {name} = {value if isinstance(value, str) else format(value, '.4g')}"
    for text in (result.traceback, result.log):
        if text:
            yield from (f"    | {line}" for line in text.splitlines())


def flat(results: Iterable[Result]) -> dict[str, Figure]:
    """Return all figures as one object: `check.figure` -> value."""
    found: dict[str, Figure] = {}
    for result in results:
        name = result.name.replace(" ", "_")
        found |= {f"{name}.outcome": result.outcome, f"{name}.seconds": round(result.seconds, 2)}
        for part in ("reason", "traceback", "log"):
            if text := getattr(result, part):
                found[f"{name}.{part}"] = text
        found |= {f"{name}.{key}": value for key, value in result.figures.items()}
    return found


def write(path: Path, results: Iterable[Result]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = path.with_name(path.name + ".new")
    whole.write_text(json.dumps(flat(results), indent=2) + "\n")
    whole.replace(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", choices=[check.name for check in CHECKS], help="these checks alone"
    )
    parser.add_argument("--json", type=Path, help="where to write one flat object, after every check")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help=f"time for all checks ({BUDGET_S:.0f})")
    parser.add_argument("--cold", action="store_true", help="import everything anew for every check")
    args = parser.parse_args()
    if absent := missing():
        print(f"not installed: {', '.join(absent)} (`make setup`, or docs/gpu.md for a machine without a package index)")
    os.environ |= environment(args.device)  # what checks are forked from imports them, and sees the same GPUs
    chosen = [check for check in CHECKS if args.only is None or check.name in args.only]
    results: list[Result] = []
    for result in Runner(device=args.device, budget_s=args.budget_s, is_warm=not args.cold).run_all(chosen):
        results.append(result)
        print("\n".join(lines_of(result)), flush=True)
        if args.json is not None:
            write(args.json, results)
        if absent and result.outcome == "skipped" and result.name == CHECKS[0].name:
            return 1
    failed = [result.name for result in results if result.outcome == "failed"]
    print(f"failed: {', '.join(failed)}" if failed else "nothing failed")
    return int(bool(failed or absent))


if __name__ == "__main__":
    sys.exit(main())
