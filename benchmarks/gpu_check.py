"""Run the code paths of training on the available device: what works, and how fast.

usage: python benchmarks/gpu_check.py [--device auto|cpu|cuda] [--only NAME ...] [--json PATH]

Every check runs in a process of its own under a deadline, so that one that fails or hangs costs only itself. Without a GPU
this is a dry run: the same paths on a CPU with tiny sizes, two at a time, where the times mean nothing. Exits 1 if any failed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
BUDGET_S = 470.0
"""Time for all checks together; those that have not begun by then are skipped."""
Figure = float | str


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    name: str
    module: str
    """The module whose CHECKS contain it."""
    limit_s: float
    gpu_only: str = ""
    """The work that would take too long on a CPU; empty if the check also runs there."""


FIRST = Check(name="environment", module="gpu_checks.model_checks", limit_s=90)
CHECKS = (
    FIRST,
    Check(name="packing", module="gpu_checks.model_checks", limit_s=60),
    Check(name="logprobs", module="gpu_checks.engine_checks", limit_s=90),
    Check(name="learn small", module="gpu_checks.learner_checks", limit_s=60),
    Check(name="kv cache", module="gpu_checks.engine_checks", limit_s=90),
    Check(name="decode small", module="gpu_checks.engine_checks", limit_s=60),
    Check(name="swap", module="gpu_checks.engine_checks", limit_s=90),
    Check(name="push", module="gpu_checks.wire_checks", limit_s=120),
    Check(name="rebuild", module="gpu_checks.wire_checks", limit_s=60),
    Check(name="checkpoint", module="gpu_checks.learner_checks", limit_s=60),
    Check(name="run", module="gpu_checks.run_checks", limit_s=150),
    Check(name="learn 0.6B", module="gpu_checks.learner_checks", limit_s=110, gpu_only="training 0.6 B parameters"),
    Check(name="decode 0.6B", module="gpu_checks.engine_checks", limit_s=110, gpu_only="a model of 0.6 B parameters"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    name: str
    outcome: str
    """ok | failed | skipped"""
    seconds: float
    reason: str = ""
    figures: dict[str, Figure] = field(default_factory=dict[str, Figure])
    traceback: str = ""


def run(check: Check, device: str, limit_s: float) -> Result:
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        path, log = Path(folder) / "result.json", Path(folder) / "output"
        command = [sys.executable, "-m", "gpu_checks", check.module, check.name, device, str(path)]
        with log.open("wb") as output:
            code = _run_within(command, limit_s, environment(device), output.fileno())
        seconds = time.monotonic() - started
        if code is not None and path.exists():
            return Result(name=check.name, seconds=seconds, **json.loads(path.read_text()))
        reason = f"did not end within {limit_s:.0f} s" if code is None else f"its process ended with code {code}"
        last_words = "\n".join(log.read_text(errors="replace").splitlines()[-30:])
        return Result(name=check.name, outcome="failed", seconds=seconds, reason=reason, traceback=last_words)


def _run_within(command: Sequence[str], limit_s: float, variables: dict[str, str], output: int) -> int | None:
    """Return the exit code, or None if the check was killed together with all processes that it started."""
    process = subprocess.Popen(command, env=variables, stdout=output, stderr=output, start_new_session=True)
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def environment(device: str) -> dict[str, str]:
    """Return the environment of a check: it can import the checks, and sees no GPU when it runs on the CPU."""
    given = dict(os.environ)
    given["PYTHONPATH"] = os.pathsep.join([str(HERE), str(HERE.parent), *filter(None, [given.get("PYTHONPATH")])])
    if device == "cpu":
        given |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return given


def run_all(checks: Sequence[Check], device: str, budget_s: float = BUDGET_S) -> Iterator[Result]:
    """Run the checks, one after another on a GPU. The environment check comes first: it finds the device for the others."""
    until = time.monotonic() + budget_s

    def one(check: Check) -> Result:
        left = until - time.monotonic()
        if left <= 0:
            return Result(name=check.name, outcome="skipped", seconds=0.0, reason=f"no time is left of {budget_s:.0f} s")
        if check.gpu_only and not on_gpu:
            return Result(name=check.name, outcome="skipped", seconds=0.0, reason=f"{check.gpu_only} needs a GPU")
        return run(check, device, min(check.limit_s, left))

    rest = [check for check in checks if check is not FIRST]
    on_gpu = device != "cpu"
    if FIRST in checks:
        found = one(FIRST)
        yield found
        on_gpu = on_gpu and str(found.figures.get("device", "cuda")).startswith("cuda")
    device = device if on_gpu else "cpu"
    with ThreadPoolExecutor(max_workers=1 if on_gpu else 2) as pool:
        yield from pool.map(one, rest)


def lines_of(result: Result) -> Iterator[str]:
    yield f"{result.name:<13} {result.outcome:<8} {result.seconds:6.1f} s  {result.reason}".rstrip()
    for name, value in result.figures.items():
        yield f"{'':<13}   {name} = {value if isinstance(value, str) else format(value, '.4g')}"
    if result.traceback:
        yield from (f"    | {line}" for line in result.traceback.splitlines())


def flat(results: Iterable[Result]) -> dict[str, Figure]:
    """Return all figures as one object: `check.figure` -> value."""
    found: dict[str, Figure] = {}
    for result in results:
        name = result.name.replace(" ", "_")
        found |= {f"{name}.outcome": result.outcome, f"{name}.seconds": round(result.seconds, 2)}
        for part in ("reason", "traceback"):
            if text := getattr(result, part):
                found[f"{name}.{part}"] = text
        found |= {f"{name}.{key}": value for key, value in result.figures.items()}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", choices=[check.name for check in CHECKS], help="these checks alone"
    )
    parser.add_argument("--json", type=Path, help="where to write one flat object")
    args = parser.parse_args()
    results: list[Result] = []
    for result in run_all([check for check in CHECKS if args.only is None or check.name in args.only], args.device):
        results.append(result)
        print("\n".join(lines_of(result)), flush=True)
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(flat(results), indent=2) + "\n")
    failed = [result.name for result in results if result.outcome == "failed"]
    print(f"failed: {', '.join(failed)}" if failed else "nothing failed")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
