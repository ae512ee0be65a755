"""The figures of a run that people ask for first, for `runs ls`, `runs show` and `top`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from async_rl.run_folders.folder import RunFolder
from async_rl.run_folders.state import RunStatus
from async_rl.telemetry.durations import duration
from async_rl.telemetry.evaluation_rows import EvaluationRow
from async_rl.telemetry.rows import MetricRow


@dataclass(frozen=True, slots=True, kw_only=True)
class RunGlance:
    run: RunFolder
    state: RunStatus
    row: MetricRow | None
    """The row of the last step."""
    evaluation: EvaluationRow | None

    @property
    def values(self) -> Mapping[str, float]:
        return {} if self.row is None else self.row.values

    @property
    def progress(self) -> str:
        """The last step, of how many."""
        step = "-" if self.row is None else str(self.row.step)
        return step if self.run.steps is None else f"{step}/{self.run.steps}"

    @property
    def outcome(self) -> tuple[str, str]:
        """The name and the value of the run's main metric: the reward, or the loss of a training run."""
        for metric, label in (("reward/mean", "reward"), ("held_out/loss", "held-out loss"), ("train/loss", "loss")):
            if metric in self.values:
                return label, f"{self.values[metric]:.4g}"
        return "reward", "-"

    @property
    def age(self) -> str:
        """Mean and maximum age of the last step's groups."""
        if "staleness/mean" not in self.values:
            return "-"
        return f"{self.values['staleness/mean']:.1f} (max {self.values.get('staleness/max', 0):.0f})"

    @property
    def elapsed(self) -> str:
        """Training time."""
        return duration(self.values["progress/wall_s"]) if "progress/wall_s" in self.values else "-"

    @property
    def evaluated(self) -> str:
        """The first measure of each environment in the last evaluation."""
        if self.evaluation is None:
            return "-"
        firsts = [
            f"{name} {measure} {value.mean:.3f}"
            for name, each in self.evaluation.environments.items()
            for measure, value in list(each.measures.items())[:1]
        ]
        return ", ".join(firsts)


def glance(run: RunFolder) -> RunGlance:
    row = run.last_row()
    return RunGlance(run=run, state=run.state(row), row=row, evaluation=run.last_evaluation())


def time_left(rows: Sequence[MetricRow], steps: int | None) -> float | None:
    """Seconds of training left, from the pace between the first and last of these rows; None if that cannot be said."""
    timed = [row for row in rows if "progress/wall_s" in row.values]
    if steps is None or len(timed) < 2 or timed[-1].step <= timed[0].step:
        return None
    first, last = timed[0], timed[-1]
    pace_s = (last.values["progress/wall_s"] - first.values["progress/wall_s"]) / (last.step - first.step)
    return pace_s * max(steps - last.step, 0)
