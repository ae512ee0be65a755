"""A whole run, learner and worker beside each other: duration of a step, and the learner's share of waiting."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from end_to_end import complete_rows, threads_of

WARM_UP = 5
"""First steps, which are not counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    step_s: float
    idle_share: float


class RunFailed(Exception):
    """The run ended early; the message has the end of its log."""


def pace_of_run(config: Path, steps: int) -> Pace:
    async_rl = Path(sys.executable).with_name("async-rl")
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["--run.folder", folder, "--run.name", "pace", "--learner.steps", str(WARM_UP + steps)]
        # the model must stay the one measured alone: training would change the lengths of answers
        arguments += ["--learner.optimizer.learning_rate", "1e-9"]
        command = [async_rl, "run", "@", config, *arguments]
        run = subprocess.run(command, env=threads_of(1), capture_output=True, text=True, check=False)
        if run.returncode != 0:
            log_end = "\n".join(run.stderr.splitlines()[-10:])
            raise RunFailed(f"async-rl run ended with exit code {run.returncode}:\n{log_end}")
        rows = [row for row in complete_rows(Path(folder) / "pace" / "metrics.jsonl") if "time/step" in row]
    ends = [row["progress/wall_s"] for row in rows[WARM_UP - 1 :]]
    return Pace(
        step_s=(ends[-1] - ends[0]) / (len(ends) - 1),
        idle_share=statistics.mean(row["idle/learner"] for row in rows[WARM_UP:]),
    )
