"""Asynchronous against synchronous runs on one device, which learner and worker share."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from shutil import which
from statistics import median

from gpu_checks.report import Checks, Machine, Report
from gpu_checks.run_checks import rows_of_a_run
from gpu_checks.sharing_checks import MPS, mps_daemon

FIRST = 3
"""Steps of a run that are not measured: kernels compile, and the first groups have to be rolled out."""
ON_A_GPU = (
    *("--model.size.hidden", "1024", "--model.size.layers", "16", "--model.size.heads", "16", "--model.size.ffn", "4096"),
    *("--batch.groups_per_step", "64", "--worker.groups_in_flight", "128", "--batch.bin_tokens", "16384"),
    *("--worker.kv_cache_gb", "8", "--worker.max_running", "1024", "--learner.optimizer.learning_rate", "1e-4"),
)
"""A model of 0.2 B parameters and 512 rollouts a step."""
IN_TURNS = ("--staleness.max_age", "0")
"""Rollouts are trained by the version that sampled them, so one side waits for the other."""


def overlap(machine: Machine, report: Report) -> None:
    """Time of a step, each of the same number of samples, in runs that alternate; with MPS where it starts."""
    spent: dict[str, list[float]] = {"asynchronous": [], "synchronous": []}
    for _ in range(3 if machine.is_gpu else 1):
        for name, settings in (("asynchronous", ()), ("synchronous", IN_TURNS)):
            spent[name].append(_step_s(machine, settings))
            report.note(**{f"{name}_step_ms": 1e3 * median(spent[name])})
    asynchronous, synchronous = (median(spent[name]) for name in ("asynchronous", "synchronous"))
    report.note(synchronous_over_asynchronous=synchronous / asynchronous)
    if not machine.is_gpu or which(MPS) is None:
        report.note(with_mps=f"not measured ({MPS} is not installed)" if machine.is_gpu else "not measured (no GPU)")
        return
    report.attempt("with_mps_step_ms", lambda: 1e3 * _with_mps(machine))


def _with_mps(machine: Machine) -> float:
    with mps_daemon() as variables:
        return _step_s(machine, (), variables)


def _step_s(machine: Machine, settings: tuple[str, ...], variables: Mapping[str, str] | None = None) -> float:
    steps = 40 if machine.is_gpu else FIRST + 3
    given = {} if variables is None else {"variables": variables}
    with tempfile.TemporaryDirectory() as folder:
        rows = rows_of_a_run(machine, Path(folder), steps, *(ON_A_GPU if machine.is_gpu else ()), *settings, **given)
    ends = [row["progress/wall_s"] for row in rows if "progress/wall_s" in row]  # others are of workers and events
    return (ends[-1] - ends[FIRST - 1]) / (len(ends) - FIRST)


CHECKS: Checks = {"overlap": overlap}
