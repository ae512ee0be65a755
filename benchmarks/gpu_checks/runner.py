"""Runs checks one after another: each in a process of its own, forked from one that has imported what checks need.

    forkserver (imports of warm.py, no CUDA) ──fork──▶ check 1: result.json, output
                                             ──fork──▶ check 2 ...

A check has a deadline; after it, or after the check, all processes that it started are killed.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from gpu_checks.one_check import begin

BENCHMARKS = Path(__file__).resolve().parents[1]
LAST_LINES = 40
Figure = float | str

FORKS = multiprocessing.get_context("forkserver")


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    name: str
    module: str
    """The module whose CHECKS contain it."""
    limit_s: float
    gpu_only: str = ""
    """The work that a CPU cannot do, or not in time; empty if the check also runs there."""
    about_s: float = 0.0
    """Seconds that it took on an H200, or is expected to take; 0: not said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    name: str
    outcome: str
    """ok | failed | skipped"""
    seconds: float
    reason: str = ""
    figures: dict[str, Figure] = field(default_factory=dict[str, Figure])
    traceback: str = ""
    log: str = ""
    """The last lines that a failed check and its processes printed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Runner:
    device: str
    """auto | cpu | cuda"""
    budget_s: float
    """Time for all checks together; those that have not begun by then are skipped."""
    is_warm: bool = True
    """False: each check imports everything anew."""

    def run_all(self, checks: Sequence[Check]) -> Iterator[Result]:
        """Run the checks, one after another on a GPU. If the first finds no GPU, the others run on the CPU, two at a time."""
        if self.is_warm:
            FORKS.set_forkserver_preload(["gpu_checks.warm"])
        until = time.monotonic() + self.budget_s
        device = self.device

        def one(check: Check) -> Result:
            left = until - time.monotonic()
            if left <= 0:
                return Result(
                    name=check.name, outcome="skipped", seconds=0.0, reason=f"no time is left of {self.budget_s:.0f} s"
                )
            if check.gpu_only and device == "cpu":
                return Result(name=check.name, outcome="skipped", seconds=0.0, reason=f"{check.gpu_only} needs a GPU")
            return self.run(check, device, min(check.limit_s, left))

        first, *rest = checks
        yield (found := one(first))
        if found.figures.get("device") == "cpu":
            device = "cpu"
        with ThreadPoolExecutor(max_workers=2 if device == "cpu" else 1) as pool:
            yield from pool.map(one, rest)

    def run(self, check: Check, device: str, limit_s: float) -> Result:
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            path, log = Path(folder) / "result.json", Path(folder) / "output"
            code = self._run_within(limit_s, (check.module, check.name, device, str(path)), log)
            seconds = time.monotonic() - started
            said = "\n".join(log.read_text(errors="replace").splitlines()[-LAST_LINES:]) if log.exists() else ""
            if code is not None and path.exists():
                found = json.loads(path.read_text())
                return Result(name=check.name, seconds=seconds, log=said if found["outcome"] == "failed" else "", **found)
            figures = json.loads(path.read_text())["figures"] if path.exists() else {}
        reason = f"did not end within {limit_s:.0f} s" if code is None else f"its process ended with code {code}"
        return Result(name=check.name, outcome="failed", seconds=seconds, reason=reason, figures=figures, log=said)

    def _run_within(self, limit_s: float, arguments: tuple[str, str, str, str], log: Path) -> int | None:
        """Return the exit code, or None if the check was killed together with all processes that it started."""
        variables = environment(arguments[2])
        process: ForkServerProcess = FORKS.Process(target=begin, args=(arguments, str(log), variables, self.is_warm))
        process.start()
        try:
            process.join(limit_s)
            return process.exitcode
        finally:
            assert process.pid is not None
            with suppress(ProcessLookupError, PermissionError):  # it makes its own group, a moment after it has begun
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join()


def environment(device: str) -> dict[str, str]:
    """Return the environment of a check: it can import the checks, and sees no GPU when it runs on the CPU."""
    given = dict(os.environ)
    given["PYTHONPATH"] = os.pathsep.join([str(BENCHMARKS), str(BENCHMARKS.parent), *filter(None, [given.get("PYTHONPATH")])])
    if device == "cpu":
        given |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return given
