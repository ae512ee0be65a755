"""Draws curves.png: reward and age of a run, or the loss of a training run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from async_rl.telemetry.rows import MetricRow


def draw(rows: Sequence[MetricRow], path: Path, *, title: str, max_age: int) -> None:
    """Draw reward and age over steps."""
    figure = Figure(figsize=(8, 6), layout="constrained")
    FigureCanvasAgg(figure)
    reward, age = figure.subplots(2, 1, sharex=True)
    reward.plot(*_series(rows, "reward/mean"), color="tab:blue")
    reward.set(title=title, ylabel="mean reward")
    age.plot(*_series(rows, "staleness/mean"), color="tab:orange", label="mean")
    age.plot(*_series(rows, "staleness/max"), color="tab:red", linewidth=0.8, label="max")
    age.plot(*_series(rows, "staleness/in_queue"), color="tab:purple", linewidth=0.8, label="mean in the queue")
    age.plot(*_series(rows, "staleness/in_flight"), color="tab:green", linewidth=0.8, label="mean in flight")
    age.axhline(max_age, color="gray", linestyle="--", label="bound")
    age.set(xlabel="step", ylabel="age (versions)", ylim=(0, max_age + 0.5))
    age.legend()
    figure.savefig(path, dpi=120)  # pyright: ignore[reportUnknownMemberType]


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
