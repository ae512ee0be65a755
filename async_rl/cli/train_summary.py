"""The summary of a training run: summary.json, curves.png and text on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from async_rl.cli.run_summary import EDGE, can_draw, mean, write_json
from async_rl.config.training import TrainingConfig
from async_rl.durable.best_effort import report_write_error
from async_rl.telemetry.rows import MetricRow, read_rows

HELD_OUT = "held_out/"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSummary:
    run: str
    method: str
    steps: int
    loss_first: float
    """Mean over the first EDGE steps."""
    loss_last: float
    last: dict[str, float]
    """All train/... metrics of the last step."""
    held_out_first: dict[str, float]
    held_out_last: dict[str, float]
    tokens_trained: int
    examples_trained: int
    wall_s: float
    """Duration of the command."""
    training_s: float
    """Training time of the run, including earlier lives."""


def write_summary(config: TrainingConfig, console: Console, *, wall_s: float) -> Path | None:
    """Write summary.json and curves.png and print the summary. Returns its path; None if no step was trained."""
    folder = config.run_folder
    path = folder / "metrics.jsonl"
    rows = read_rows(path) if path.exists() else []
    trained = [row for row in rows if "train/loss" in row.values]
    if not trained:
        console.print("No step was trained, so there is no summary.")
        return None
    summary = summarise(rows, trained, config, wall_s=wall_s)
    path = write_json(summary, folder, console)
    _print(summary, console)
    if can_draw(console):
        from async_rl.cli.curves import draw_training

        with report_write_error(folder / "curves.png", console.print):
            draw_training(rows, folder / "curves.png", title=summary.run)
    console.print(str(path), soft_wrap=True, highlight=False, markup=False)
    return path


def summarise(
    rows: Sequence[MetricRow], trained: Sequence[MetricRow], config: TrainingConfig, *, wall_s: float
) -> TrainingSummary:
    examined = [row for row in rows if f"{HELD_OUT}loss" in row.values]
    last = trained[-1].values
    return TrainingSummary(
        run=config.run.name,
        method=config.method,
        steps=trained[-1].step,
        loss_first=mean(trained[:EDGE], "train/loss"),
        loss_last=mean(trained[-EDGE:], "train/loss"),
        last=_named(trained[-1], "train/"),
        held_out_first=_named(examined[0], HELD_OUT) if examined else {},
        held_out_last=_named(examined[-1], HELD_OUT) if examined else {},
        tokens_trained=int(last["progress/tokens"]),
        examples_trained=int(last["progress/samples"]),
        wall_s=wall_s,
        training_s=last["progress/wall_s"],
    )


def _named(row: MetricRow, prefix: str) -> dict[str, float]:
    return {name.removeprefix(prefix): value for name, value in row.values.items() if name.startswith(prefix)}


def _print(summary: TrainingSummary, console: Console) -> None:
    console.print(
        f"loss {summary.loss_first:.4f} -> {summary.loss_last:.4f} in {summary.steps} steps, "
        f"{summary.wall_s:.0f} s (training {summary.training_s:.0f} s)"
    )
    for name in ("loss", "accuracy"):
        if name in summary.held_out_last:
            first, last = summary.held_out_first[name], summary.held_out_last[name]
            console.print(f"held-out {name} {first:.4f} -> {last:.4f}")
    console.print(f"trained {summary.tokens_trained:,} tokens of {summary.examples_trained:,} examples")
