"""Run a cell: `async-rl run`, watched until it has shown what it should."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import end_to_end

from age_parts.cells import TASKS, Cell
from age_parts.figures import is_over, result_of

GIVE_UP_S = 3600.0


def run(cell: Cell) -> dict[str, Any]:
    """Run a cell until it is over and return its line. Raises RuntimeError if the run fails."""
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="age_study_") as temporary:
        folder = Path(temporary)
        metrics, log = folder / "cell" / "metrics.jsonl", folder / "log"
        with log.open("w") as terminal:
            command = [Path(sys.executable).with_name("async-rl"), "run", *cell.words(folder)]
            process = subprocess.Popen(command, env=end_to_end.threads_of(1), stdout=terminal, stderr=subprocess.STDOUT)
            try:
                ended = wait(cell, process, metrics)
            finally:
                end_to_end.stop(process)
        rows = trained_rows(metrics)
        if (not ended and process.returncode != 0) or len(rows) < TASKS[cell.task].window:
            last_words = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
            raise RuntimeError(f"{cell.name} ended ({process.returncode}) after {len(rows)} steps:\n{last_words}")
        return {"cell": cell.name, **result_of(cell, rows), **facts(), "load": round(load, 1)}


def wait(cell: Cell, process: subprocess.Popen[bytes], metrics: Path) -> bool:
    """Wait until the run ends (False), or until it has shown what it should (True)."""
    deadline = time.monotonic() + GIVE_UP_S
    while process.poll() is None:
        if is_over(cell, trained_rows(metrics)):
            return True
        if time.monotonic() > deadline:
            raise RuntimeError(f"{cell.name} takes longer than {GIVE_UP_S:g} s")
        time.sleep(1.0)
    return False


def trained_rows(metrics: Path) -> list[dict[str, float]]:
    return [row for row in end_to_end.complete_rows(metrics) if "reward/mean" in row]


def facts() -> dict[str, Any]:
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "python": platform.python_version(),
        "torch": version("torch"),
        "megatron": version("megatron-core"),
        "cores": os.cpu_count(),
    }
