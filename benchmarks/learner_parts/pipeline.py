"""A whole run, learner and worker beside each other: duration of a step, the learner's share of waiting, and who computes."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from end_to_end import LOOK_EVERY_S, complete_rows, stop, threads_of

from learner_parts.cpu_time import ROLES, cpu_seconds

WARM_UP = 5
"""First steps, which are not counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    step_s: float
    idle_share: float
    cpu_s: dict[str, float]
    """CPU seconds of a step, by role. Empty where they are not known."""


class RunFailed(Exception):
    """The run ended early; the message has the end of its log."""


def pace_of_run(config: Path, steps: int) -> Pace:
    async_rl = Path(sys.executable).with_name("async-rl")
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["--run.folder", folder, "--run.name", "pace", "--learner.steps", str(WARM_UP + steps)]
        # the model must stay the one measured alone: training would change the lengths of answers
        arguments += ["--learner.optimizer.learning_rate", "1e-9"]
        command = [async_rl, "run", "@", config, *arguments]
        metrics, log = Path(folder) / "pace" / "metrics.jsonl", Path(folder) / "log"
        with log.open("w") as terminal:
            run = subprocess.Popen(command, env=threads_of(1), stdout=subprocess.DEVNULL, stderr=terminal)
            try:
                spent = watched_cpu(run, metrics)
            finally:
                stop(run)
        if run.returncode != 0:
            log_end = "\n".join(log.read_text().splitlines()[-10:])
            raise RunFailed(f"async-rl run ended with exit code {run.returncode}:\n{log_end}")
        rows = steps_of(metrics)
    ends = [row["progress/wall_s"] for row in rows[WARM_UP - 1 :]]
    return Pace(
        step_s=(ends[-1] - ends[0]) / (len(ends) - 1),
        idle_share=statistics.mean(row["idle/learner"] for row in rows[WARM_UP:]),
        cpu_s=spent,
    )


def watched_cpu(run: subprocess.Popen[bytes], metrics: Path) -> dict[str, float]:
    """Wait for the run's end; return CPU seconds of a step from the end of the warm-up to the last look at both roles."""
    looks: list[tuple[int, dict[str, float]]] = []
    while run.poll() is None:
        if (steps := len(steps_of(metrics))) >= WARM_UP and (not looks or steps > looks[-1][0]):
            spent = cpu_seconds(run.pid)
            if spent.keys() >= set(ROLES.values()):
                looks.append((steps, spent))
        time.sleep(LOOK_EVERY_S)
    if len(looks) < 2:
        return {}
    (first, before), (last, after) = looks[0], looks[-1]
    return {role: (seconds - before[role]) / (last - first) for role, seconds in after.items()}


def steps_of(metrics: Path) -> Sequence[dict[str, float]]:
    return [row for row in complete_rows(metrics) if "time/step" in row]
