"""The summary of a run: summary.json, curves.png and text on the terminal."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from async_rl.config import Config
from async_rl.durable.best_effort import report_write_error
from async_rl.durable.whole_file import write_whole
from async_rl.run_folders.waits_for import CAUSES, idle_shares
from async_rl.telemetry.evaluation_rows import EvaluationRow, read_evaluations
from async_rl.telemetry.rows import MetricRow, read_objects, read_rows
from async_rl.telemetry.sinks.tables import ages_of

EDGE = 3
"""Number of first and last steps over which values are averaged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    run: str
    steps: int
    reward_first: float
    reward_last: float
    """Mean reward of trained groups, without those that batch.drop_no_signal drops."""
    reward_all_first: float | None
    reward_all_last: float | None
    """Mean reward of all episodes that ended in the same steps, trained or not; None if no worker reported any."""
    age_mean: float
    """Mean age of all trained groups."""
    age_max: int
    max_age: int
    """The configured bound."""
    age_histogram: dict[str, int]
    """Number of groups by age."""
    tokens_trained: int
    samples_trained: int
    wall_s: float
    """Duration of the command."""
    training_s: float
    """Training time of the run, including earlier lives."""
    idle: dict[str, float]
    """Shares of the learner's time in which it did not train, by cause."""
    evaluations: list[EvaluationRow]
    """Evaluations, ordered by step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRow:
    step: int
    prompt: str
    text: str
    reward: float | None
    age: int


def write_summary(config: Config, console: Console, *, wall_s: float) -> Path | None:
    """Write summary.json and curves.png and print the summary. Returns its path; None if no step was trained."""
    folder = config.run_folder
    rows = _trained_rows(folder / "metrics.jsonl")
    if not rows:
        console.print("No step was trained, so there is no summary.")
        return None
    evaluations = read_evaluations(folder / "metrics.jsonl")
    summary = summarise(rows, evaluations, run=config.run.name, max_age=config.limits.age_bound, wall_s=wall_s)
    path = write_json(summary, folder, console)
    _print_samples(read_samples(folder / "samples.jsonl"), console)
    _print_summary(summary, console)
    if can_draw(console):
        from async_rl.cli.curves import draw

        with report_write_error(folder / "curves.png", console.print):
            draw(rows, evaluations, folder / "curves.png", title=summary.run, max_age=summary.max_age)
    if summary.steps < config.learner.steps:
        going_on = (
            f"Stopped after step {summary.steps} of {config.learner.steps}. Continue with: async-rl run @ {folder}/config.yaml"
        )
        console.print(going_on, soft_wrap=True, highlight=False, markup=False)
    console.print(str(path), soft_wrap=True, highlight=False, markup=False)
    return path


def summarise(
    rows: Sequence[MetricRow], evaluations: Sequence[EvaluationRow], *, run: str, max_age: int, wall_s: float
) -> RunSummary:
    histogram = age_histogram(rows)
    groups = sum(histogram.values())
    last = rows[-1].values
    return RunSummary(
        run=run,
        steps=rows[-1].step,
        reward_first=mean(rows[:EDGE], "reward/mean"),
        reward_last=mean(rows[-EDGE:], "reward/mean"),
        reward_all_first=_mean_if_any(rows[:EDGE], "rollout/reward"),
        reward_all_last=_mean_if_any(rows[-EDGE:], "rollout/reward"),
        age_mean=sum(age * count for age, count in histogram.items()) / groups if groups else 0.0,
        age_max=max(histogram, default=0),
        max_age=max_age,
        age_histogram={str(age): count for age, count in histogram.items()},
        tokens_trained=int(last.get("progress/tokens", 0)),
        samples_trained=int(last.get("progress/samples", 0)),
        wall_s=wall_s,
        training_s=last.get("progress/wall_s", 0.0),
        idle=idle_shares([row.values for row in rows]),
        evaluations=list(evaluations),
    )


def age_histogram(rows: Sequence[MetricRow]) -> dict[int, int]:
    found: dict[int, int] = {}
    for row in rows:
        for age, groups in ages_of(row.values).items():
            found[age] = found.get(age, 0) + groups
    return dict(sorted(found.items()))


def read_samples(path: Path) -> list[SampleRow]:
    """Sampled rollouts in order of their steps, including those of superseded attempts of a step."""
    found = (SampleRow(**{name: row[name] for name in SampleRow.__slots__}) for row in read_objects(path))
    return sorted(found, key=lambda sample: sample.step)


def _trained_rows(path: Path) -> list[MetricRow]:
    return [row for row in read_rows(path) if "reward/mean" in row.values] if path.exists() else []


def mean(rows: Sequence[MetricRow], name: str) -> float:
    return sum(row.values[name] for row in rows) / len(rows)


def _mean_if_any(rows: Sequence[MetricRow], name: str) -> float | None:
    present = [row for row in rows if name in row.values]
    return mean(present, name) if present else None


def _print_samples(samples: Sequence[SampleRow], console: Console) -> None:
    if not samples:
        return
    table = Table(title="Samples from the first and last steps", title_justify="left", expand=False)
    for heading in ("step", "prompt", "answer", "reward", "age"):
        table.add_column(heading, justify="left" if heading in ("prompt", "answer") else "right")
    early, late = samples[:EDGE], samples[EDGE:][-EDGE:]
    for sample in (*early, *late):
        reward = "-" if sample.reward is None else f"{sample.reward:.2f}"
        # Text, so that output of the model is not interpreted as markup
        table.add_row(str(sample.step), Text(sample.prompt[:60]), Text(sample.text[:80]), reward, str(sample.age))
    console.print(table)


def _print_summary(summary: RunSummary, console: Console) -> None:
    console.print(
        f"reward {summary.reward_first:.3f} -> {summary.reward_last:.3f} in {summary.steps} steps, "
        f"{summary.wall_s:.0f} s (training {summary.training_s:.0f} s)"
    )
    if summary.reward_all_first is not None and summary.reward_all_last is not None:
        console.print(
            f"reward of all episodes, trained or not: {summary.reward_all_first:.3f} -> {summary.reward_all_last:.3f}"
        )
    console.print(f"trained {summary.tokens_trained:,} tokens of {summary.samples_trained:,} rollouts")
    console.print(
        f"age of the groups when trained: mean {summary.age_mean:.2f}, max {summary.age_max}, bound {summary.max_age}"
    )
    if summary.idle:
        causes = ", ".join(f"{CAUSES[cause]} {share:.1%}" for cause, share in summary.idle.items())
        total = sum(summary.idle.values())
        console.print(f"the learner was idle {total:.1%} of the time: {causes}", highlight=False, soft_wrap=True)
    most = max(summary.age_histogram.values(), default=0)
    for age, count in summary.age_histogram.items():
        console.print(f"  {age:>3} {'█' * max(1, round(40 * count / most))} {count}", highlight=False)
    for row in (*summary.evaluations[:1], *summary.evaluations[1:][-1:]):
        for line in row.lines:
            console.print(line, highlight=False, soft_wrap=True, markup=False)


def write_json(summary: Any, folder: Path, console: Console) -> Path:
    """Write summary.json and return its path; a disk that refuses it is reported."""
    path = folder / "summary.json"
    with report_write_error(path, console.print):
        write_whole(path, json.dumps(asdict(summary), indent=2) + "\n")
    return path


def can_draw(console: Console) -> bool:
    """Whether matplotlib is installed; says how to install it if not."""
    if importlib.util.find_spec("matplotlib") is not None:
        return True
    console.print("No curves.png: it needs pip install 'async-rl[plot]'.", markup=False)
    return False
