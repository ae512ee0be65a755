"""Metrics on the console: a live panel on a terminal, else one line per step."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import pairwise

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from async_rl.config.training import AnyRun
from async_rl.protocols import MetricsSink
from async_rl.telemetry.durations import duration
from async_rl.telemetry.evaluation_rows import EvaluationRow, read_evaluation

BARS = "▁▂▃▄▅▆▇█"


COLUMNS = (
    ("reward/mean", "reward", "{:.3f}"),
    ("rollout/reward", "of all", "{:.3f}"),
    ("train/loss", "loss", "{:.4f}"),
    ("train/accuracy", "accuracy", "{:.3f}"),
    ("held_out/loss", "held out", "{:.4f}"),
    ("held_out/accuracy", "accuracy", "{:.3f}"),
    ("staleness/mean", "age", "{:.2f}"),
    ("staleness/max", "oldest", "{:.0f}"),
    ("weights/version", "version", "{:.0f}"),
    ("perf/tok_s", "tok/s", "{:,.0f}"),
    ("optim/grad_norm", "grad", "{:.2f}"),
    ("time/step", "s/step", "{:.2f}"),
)
"""Metric, label and format."""


def open_console(config: AnyRun) -> MetricsSink:
    console = Console(file=sys.stdout)
    steps = config.learner.steps
    return LivePanel(console, config.run.name, steps) if console.is_terminal else StepLines(console, steps)


CURVES = ("reward/mean", "train/loss")
"""Metrics drawn as a curve; a run has one of them."""


class ProgressClock:
    """Elapsed training time and an estimate of the remaining time."""

    def __init__(self, steps: int | None) -> None:
        self._steps = steps
        self._recent: deque[tuple[int, float]] = deque(maxlen=PACE_STEPS)

    def text(self, step: int, metrics: Mapping[str, float]) -> str:
        """Text for a row of metrics; "" for rows without the elapsed time."""
        if (wall_s := metrics.get(ELAPSED)) is None:
            return ""
        self._recent.append((step, wall_s))
        first, since = self._recent[0]
        if self._steps is None or step <= first:
            return f"elapsed {duration(wall_s)}"
        left_s = (wall_s - since) / (step - first) * max(self._steps - step, 0)
        return f"elapsed {duration(wall_s)}  left {duration(left_s)}"


PACE_STEPS = 20
"""Number of recent steps from which the remaining time is estimated."""
ELAPSED = "progress/wall_s"


class StepLines:
    def __init__(self, console: Console, steps: int | None) -> None:
        self._console = console
        self._steps = steps
        self._pace = ProgressClock(steps)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        cells = [f"{label} {form.format(metrics[name])}" for name, label, form in COLUMNS if name in metrics]
        if cells:
            cells += [pace] if (pace := self._pace.text(step, metrics)) else []
            self._console.print("  ".join([_of(step, self._steps), *cells]), highlight=False, soft_wrap=True)
        if (evaluation := read_evaluation(metrics)) is not None:
            for line in evaluation.lines:
                self._console.print(line, highlight=False, soft_wrap=True, markup=False)

    def close(self) -> None:
        pass


class LivePanel:
    def __init__(self, console: Console, run: str, steps: int | None) -> None:
        self._run = run
        self._steps = steps
        self._step = 0
        self._newest: dict[str, float] = {}
        self._curve: dict[int, float] = {}
        self._evaluation: EvaluationRow | None = None
        self._pace, self._elapsed = ProgressClock(steps), ""
        self._live = Live(self._panel(), console=console, auto_refresh=False)
        self._live.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._step = max(step, self._step)
        self._newest.update(metrics)
        self._elapsed = pace if (pace := self._pace.text(step, metrics)) else self._elapsed
        if (evaluation := read_evaluation(metrics)) is not None:
            self._evaluation = evaluation
        for name in CURVES:
            if name in metrics:
                self._curve[step] = metrics[name]
        self._live.update(self._panel(), refresh=True)

    def close(self) -> None:
        self._live.stop()

    def _panel(self) -> Panel:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        shown = [column for column in COLUMNS if column[0] in self._newest]
        for _, label, _ in shown:
            table.add_column(label, justify="right", header_style="dim")
        table.add_row(*(form.format(self._newest[name]) for name, _, form in shown))
        curve = Text(sparkline([self._curve[step] for step in sorted(self._curve)], width=72), style="cyan")
        evaluated = [Text(line) for line in self._evaluation.lines] if self._evaluation is not None else []
        title = f"[bold]{self._run}[/]  {_of(self._step, self._steps)}  {self._elapsed}".rstrip()
        return Panel(Group(table, curve, *evaluated), title=title, title_align="left", expand=False)


def _of(step: int, steps: int | None) -> str:
    return f"step {step}/{steps}" if steps is not None else f"step {step}"


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw a curve in at most `width` characters, each the mean of an equal share of the values."""
    if not values:
        return ""
    count = min(width, len(values))
    edges = [round(index * len(values) / count) for index in range(count + 1)]
    means = [sum(values[start:stop]) / (stop - start) for start, stop in pairwise(edges)]
    low, span = min(means), max(means) - min(means)
    return "".join(BARS[round((mean - low) / span * (len(BARS) - 1)) if span > 0 else 0] for mean in means)
