"""Check of the whole system on one machine: `async-rl run` for a few steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from gpu_checks.report import Checks, Machine, Report

REPOSITORY = Path(__file__).parents[2]
WINDOW = 3


def run(machine: Machine, report: Report) -> None:
    """The reward must rise within the first steps; learner and worker share the device."""
    steps = 40 if machine.is_gpu else 12
    with tempfile.TemporaryDirectory() as folder:
        rows = rows_of_a_run(machine, Path(folder), steps)
    rewards = [row["reward/mean"] for row in rows if "reward/mean" in row]
    seconds = max((row["progress/wall_s"] for row in rows if "progress/wall_s" in row), default=0.0)
    report.require(len(rewards) == steps, f"{len(rewards)} steps of {steps} are in metrics.jsonl")
    first, last = sum(rewards[:WINDOW]) / WINDOW, sum(rewards[-WINDOW:]) / WINDOW
    report.note(
        steps=steps, reward_first=first, reward_last=last, seconds_per_step=seconds / steps,
        age_max=max(row.get("staleness/max", 0.0) for row in rows),
    )  # fmt: skip
    report.require(last > first + (0.2 if machine.is_gpu else 0.03), f"the reward did not rise: {first:.3f}, then {last:.3f}")


def rows_of_a_run(
    machine: Machine, folder: Path, steps: int, *settings: str, variables: Mapping[str, str] = os.environ
) -> list[dict[str, float]]:
    """Return the metrics of every step of `async-rl run`, with further settings."""
    arguments = [
        *("@", str(REPOSITORY / "configs" / "end_to_end.yaml"), "--device", machine.device.type),
        *("--run.folder", str(folder), "--run.name", "gpu-check"),
        *("--learner.steps", str(steps), "--learner.checkpoint_every", str(steps)),
        *settings,
    ]
    start = "from async_rl.cli.main import main; main()"
    ended = subprocess.run(
        [sys.executable, "-P", "-c", start, "run", *arguments], env={**variables}, capture_output=True, text=True, check=False
    )
    if ended.returncode != 0:
        logs = "\n".join(log.read_text(errors="replace")[-1500:] for log in folder.glob("*/logs/*.log"))
        raise RuntimeError(f"async-rl run ended with code {ended.returncode}:\n{logs}\n{ended.stderr[-3000:]}")
    return [json.loads(line) for line in (folder / "gpu-check" / "metrics.jsonl").read_text().splitlines()]


CHECKS: Checks = {"run": run}
