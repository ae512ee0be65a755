"""The tables and plots of docs/studies/age.md, from the lines of the cells."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from age_parts.cells import AGES, CELLS, TASKS

BEGIN, END = "<!-- tables: age_study.py --report -->\n", "<!-- end of the tables -->"

Line = Mapping[str, Any]


def read(data: Path) -> dict[str, Line]:
    """Return the finished cells by name."""
    if not data.exists():
        return {}
    return {line["cell"]: line for line in map(json.loads, data.read_text().splitlines())}


COLUMNS = (
    "objective, optimizer",
    "max_age",
    "seeds",
    "samples to the reward",
    "x age 0, same seed",
    "wall, s",
    "final reward",
    "collapsed",
    "mean age",
    "clipped or masked",
)


def tables(found: Mapping[str, Line]) -> str:
    """Return the tables of the page: medians over the seeds, with the smallest and the largest."""
    parts: list[str] = []
    for task in TASKS:
        if rows := list(rows_of_table(task, found)):
            head = [COLUMNS, ["---"] * len(COLUMNS)]
            lines = ["| " + " | ".join(row) + " |" for row in [*head, *rows]]
            parts.append(f"### {task}: a mean reward of {TASKS[task].target:g}\n\n" + "\n".join(lines) + "\n")
    missing = sum(cell.name not in found for cell in CELLS)
    parts.append(f"{len(CELLS) - missing} of {len(CELLS)} cells are collected.\n")
    return "\n".join(parts)


def rows_of_table(task: str, found: Mapping[str, Line]) -> Iterable[list[str]]:
    for objective, optimizer in series_of(task, found):
        fresh = {seed_of(line): numeric(line["samples"]) for line in lines_of(found, task, objective, 0, optimizer)}
        for age in AGES:
            lines = lines_of(found, task, objective, age, optimizer)
            if not lines:
                continue
            samples = [numeric(line["samples"]) for line in lines]
            pairs = [(numeric(line["samples"]), fresh.get(seed_of(line), math.inf)) for line in lines]
            ratios = [old / new for old, new in pairs if math.isfinite(new)]
            yield [
                f"`{objective}`, {optimizer}",
                str(age),
                str(len(lines)),
                spread(samples, ",.0f"),
                spread(ratios, ".2f") if ratios else "",
                spread([numeric(line["wall_s"]) for line in lines], ".0f"),
                spread([line["final"] for line in lines], ".2f"),
                str(sum(line["collapsed"] for line in lines)),
                f"{median(line['age'] for line in lines):.1f}",
                f"{median(line['bounded'] for line in lines):.0%}",
            ]


def seed_of(line: Line) -> str:
    return line["cell"].rpartition("/")[2]


def numeric(value: float | None) -> float:
    """Return infinity for a target that was not reached."""
    return math.inf if value is None else value


def series_of(task: str, found: Mapping[str, Line]) -> list[tuple[str, str]]:
    """Return the objectives and optimizers that a task has lines of."""
    series = dict.fromkeys((cell.objective, cell.optimizer) for cell in CELLS if cell.task == task)
    return [each for each in series if any(lines_of(found, task, each[0], age, each[1]) for age in AGES)]


def lines_of(found: Mapping[str, Line], task: str, objective: str, age: int, optimizer: str) -> list[Line]:
    prefix = f"{task}/{objective}/age{age}/{optimizer}/"
    return [line for name, line in found.items() if name.startswith(prefix)]


def spread(values: Sequence[float], form: str) -> str:
    """Return the median and, of several values, the smallest and the largest; "never" stands for infinite."""
    low, middle, high = (
        "never" if math.isinf(value) else format(value, form) for value in (min(values), median(values), max(values))
    )
    return middle if low == high else f"{middle} ({low} to {high})"


def draw(found: Mapping[str, Line], task: str, path: Path) -> None:
    """Draw the reward curves of a task: an axis per objective, a colour per age, a line per seed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    series = series_of(task, found)
    columns = min(3, len(series))
    rows = math.ceil(len(series) / columns)
    figure = Figure(figsize=(4 * columns, 0.6 + 2.6 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for axis, (objective, optimizer) in zip(axes.flat, series, strict=False):
        for index, age in enumerate(AGES):
            for number, line in enumerate(lines_of(found, task, objective, age, optimizer)):
                label = f"max_age {age}" if number == 0 else None
                axis.plot(*zip(*line["curve"], strict=True), color=f"C{index}", linewidth=1, label=label)
        axis.axhline(TASKS[task].target, color="gray", linestyle="--", linewidth=0.8)
        axis.set_title(f"{objective}, {optimizer}", fontsize=9)
        axis.legend(fontsize=7)
    for axis in axes.flat[len(series) :]:
        axis.remove()
    figure.supxlabel("steps that the sampling policy had been trained", fontsize=9)
    figure.supylabel(f"mean reward, {task}", fontsize=9)
    figure.savefig(path, dpi=100)  # pyright: ignore[reportUnknownMemberType]


def report(data: Path, page: Path) -> None:
    """Put the tables into the page and draw the plots beside it."""
    found = read(data)
    before, rest = page.read_text().split(BEGIN)
    page.write_text(before + BEGIN + "\n" + tables(found) + "\n" + END + rest.split(END)[1])
    for task in TASKS:
        if any(name.startswith(f"{task}/") for name in found):
            draw(found, task, page.parent / f"age_{task}.png")
    print(tables(found))
