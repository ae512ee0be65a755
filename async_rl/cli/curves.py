"""Draws curves.png: reward, evaluation, age and throughput of a run, or the loss of a training run."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from async_rl.telemetry.evaluation_rows import EvaluationRow
from async_rl.telemetry.rows import MetricRow

PANEL_HEIGHT = 2.6


def draw(rows: Sequence[MetricRow], evaluations: Sequence[EvaluationRow], path: Path, *, title: str, max_age: int) -> None:
    """Draw reward, evaluation (if there was any), age and throughput over steps."""
    panels = 4 if evaluations else 3
    figure = Figure(figsize=(8, PANEL_HEIGHT * panels), layout="constrained")
    FigureCanvasAgg(figure)
    axes: list[Any] = list(figure.subplots(panels, 1, sharex=True))
    reward, age, throughput = axes[0], axes[-2], axes[-1]
    reward.plot(*_series(rows, "reward/mean"), color="tab:blue", label="trained")
    reward.plot(*_series(rows, "rollout/reward"), color="tab:cyan", linewidth=0.8, label="all episodes")
    reward.set(title=title, ylabel="mean reward")
    if evaluations:
        _draw_evaluations(axes[1], evaluations)
    age.plot(*_series(rows, "staleness/mean"), color="tab:orange", label="mean")
    age.plot(*_series(rows, "staleness/max"), color="tab:red", linewidth=0.8, label="max")
    age.plot(*_series(rows, "staleness/in_queue"), color="tab:purple", linewidth=0.8, label="mean in the queue")
    age.plot(*_series(rows, "staleness/in_flight"), color="tab:green", linewidth=0.8, label="mean in flight")
    age.axhline(max_age, color="gray", linestyle="--", label="bound")
    age.set(ylabel="age (versions)", ylim=(0, max_age + 0.5))
    throughput.plot(*_series(rows, "perf/tok_s"), color="tab:blue", label="trained")
    throughput.plot(*_series(rows, "rollout/tok_s"), color="tab:cyan", linewidth=0.8, label="sampled")
    throughput.set(xlabel="step", ylabel="tokens/s", ylim=(0, None))
    for each in axes:
        each.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize="small", frameon=False)
    figure.savefig(path, dpi=120)  # pyright: ignore[reportUnknownMemberType]


def _draw_evaluations(axes: Any, evaluations: Sequence[EvaluationRow]) -> None:
    """Draw the first measure of each environment with its interval."""
    found: dict[str, list[tuple[int, float, float, float]]] = {}
    for row in evaluations:
        for name, each in row.environments.items():
            for measure, value in islice(each.measures.items(), 1):
                low, high = (value.mean if bound is None else bound for bound in (value.low, value.high))
                found.setdefault(f"{name} {measure}", []).append(
                    (row.step, value.mean, max(0.0, value.mean - low), max(0.0, high - value.mean))
                )
    for label, points in found.items():
        steps, means, below, above = zip(*points, strict=True)
        axes.errorbar(steps, means, yerr=(below, above), marker=".", capsize=2, label=label)
    axes.set(ylabel="evaluation")


def _series(rows: Sequence[MetricRow], name: str) -> tuple[list[int], list[float]]:
    present = [row for row in rows if name in row.values]
    return [row.step for row in present], [row.values[name] for row in present]


def draw_training(rows: Sequence[MetricRow], path: Path, *, title: str) -> None:
    """Draw the training loss and the held-out loss."""
    figure = Figure(figsize=(8, 4), layout="constrained")
    FigureCanvasAgg(figure)
    loss: Any = figure.subplots()
    loss.plot(*_series(rows, "train/loss"), color="tab:blue", label="trained")
    loss.plot(*_series(rows, "held_out/loss"), color="tab:orange", marker=".", label="held out")
    loss.set(title=title, xlabel="step", ylabel="loss")
    loss.legend()
    figure.savefig(path, dpi=120)  # pyright: ignore[reportUnknownMemberType]
