"""Measure what age costs: samples to a reward, final reward and collapses of objectives at fixed ages.

Every cell of the table is one `async-rl run` (task, objective, max_age, learning rate, seed) with `staleness.pace: full` and a
buffer that is kept full, so that groups are as old as max_age says. A finished cell is one line of docs/studies/age.jsonl;
cells that are there are not run again, and an interrupted one leaves nothing.

    python benchmarks/age_study.py --minutes 60                       # the next cells, in order of value
    python benchmarks/age_study.py --only 'even_digits/*/age8'        # some of them
    python benchmarks/age_study.py --report                           # the tables and plots of docs/studies/age.md
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from fnmatch import fnmatch
from importlib.metadata import version
from itertools import product
from pathlib import Path
from statistics import mean, median
from typing import Any

import end_to_end

STUDIES = end_to_end.REPOSITORY / "docs" / "studies"
DATA, PAGE = STUDIES / "age.jsonl", STUDIES / "age.md"
BEGIN, END = "<!-- tables: age_study.py --report -->\n", "<!-- end of the tables -->"
GROUPS_PER_STEP = 8
LAST = 10
"""Step batches of the final reward."""
COLLAPSE = 0.8
"""A run whose final reward is below this share of its best window has collapsed."""
STEPS_AFTER_TARGET = 30
POINTS = 24
"""Points kept of a reward curve."""
GIVE_UP_S = 3600.0

Row = Mapping[str, float]
Line = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A task of the study: what differs from configs/end_to_end.yaml."""

    target: float
    steps: int
    """Steps after which a run at age 0 that has not reached the target ends."""
    settings: Mapping[str, str]
    window: int = 5
    """Successive step batches whose mean reward is compared with the target."""


TASKS = {
    "even_digits": Task(target=0.9, steps=120, settings={}),
    "counting": Task(
        target=0.9,
        steps=200,
        settings={
            "environments": "[{type: counting, args: {length: 12}}]",
            "tokenizer.alphabet": "0123456789=",
            "sampling.max_tokens": "12",
            "model.size.layers": "2",
            "batch.group_size": "16",
        },
    ),
    "guess_number": Task(  # two turns; the best strategy begins with the middle and earns 2/3
        target=0.6,
        window=20,  # with 40 secrets in 5 batches, a policy that earns 0.5 would soon have a lucky window
        steps=400,
        settings={
            "environments": "[{type: guess_number, args: {highest: 3, max_turns: 2}}]",
            "tokenizer.alphabet": "0123456789=-beghilmnorsuw",
            "sampling.max_tokens": "1",
            "model.size.layers": "2",
            "batch.group_size": "16",
        },
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One run of the study."""

    task: str
    objective: str
    age: int
    learning_rate: float
    seed: int

    @property
    def name(self) -> str:
        return f"{self.task}/{self.objective}/age{self.age}/lr{self.learning_rate:g}/seed{self.seed}"

    @property
    def steps(self) -> int:
        """Steps of a run that does not reach the target: at a high age the first steps see the initial weights only."""
        return TASKS[self.task].steps + 3 * self.age

    def words(self, folder: Path) -> list[str]:
        """Return the arguments of `async-rl run`."""
        settings = {
            "run.folder": str(folder),
            "run.name": "cell",
            "run.seed": str(self.seed),
            "learner.objective": self.objective,
            "learner.steps": str(self.steps),
            "learner.checkpoint_every": "1000",
            "learner.optimizer.learning_rate": repr(self.learning_rate),
            "staleness.max_age": str(self.age),
            "staleness.pace": "full",
            **TASKS[self.task].settings,
        }
        if self.age >= 2:  # the learner waits until the buffer is full, or its speed would decide the age
            settings |= {
                "replay.samples_per_insert": "1.0",
                "replay.min_groups": str(GROUPS_PER_STEP * (self.age - 1)),
                "replay.error_buffer": str(float(GROUPS_PER_STEP)),
            }
        return ["@", str(end_to_end.CONFIG), *(word for key, value in settings.items() for word in (f"--{key}", value))]


def cells_of(
    tasks: Iterable[str], objectives: Iterable[str], ages: Iterable[int], *, learning_rate: float = 1e-3, seeds: Iterable[int]
) -> list[Cell]:
    combinations = product(seeds, tasks, objectives, ages)
    return [
        Cell(task=task, objective=objective, age=age, learning_rate=learning_rate, seed=seed)
        for seed, task, objective, age in combinations
    ]


COMPARED = ("async_default", "grpo")
OTHERS = ("decoupled_ppo", "cispo", "tis", "gspo", "icepop", "reinforce")
AGES = (0, 1, 2, 8, 64)
CELLS = [
    *cells_of(["even_digits", "counting"], COMPARED, (0, 8, 64, 1), seeds=(1, 2, 3)),
    *cells_of(["even_digits"], OTHERS, (8, 64, 1), seeds=(1, 2, 3)),
    *cells_of(["even_digits"], ["async_default"], (1, 8, 64), learning_rate=3e-4, seeds=(1, 2, 3)),
    *cells_of(["guess_number"], COMPARED, (0, 8, 64, 1), seeds=(1, 2, 3)),
    *cells_of(["even_digits"], ["async_default"], (0, 1, 8, 64), seeds=(4, 5)),
    *cells_of(TASKS, COMPARED, (2,), seeds=(1, 2, 3)),
    *cells_of(["even_digits"], ["async_default"], (2,), seeds=(4, 5)),
]
"""In order of value, so that what was collected when time ran out says most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The policy of one step batch: what it had been trained on when it sampled the batch, and the reward of the batch."""

    step: float
    samples: float
    reward: float


def curve_of(rows: Sequence[Row]) -> list[Point]:
    """Return the reward over what the sampling policy had been trained on, without the delay that age puts between them."""
    points: list[Point] = []
    for step, row in enumerate(rows, start=1):
        sampled_after = max(step - 1 - row["staleness/mean"], 0.0)
        points.append(
            Point(step=sampled_after, samples=row["progress/samples"] * sampled_after / step, reward=row["reward/mean"])
        )
    return points


def reached(points: Sequence[Point], task: Task) -> int | None:
    """Return the index of the first point that ends a window with a mean of at least the target."""
    return next((end for end, reward in windows(points, task) if reward >= task.target), None)


def windows(points: Sequence[Point], task: Task) -> Iterable[tuple[int, float]]:
    """Yield the index of the last point of every window, and its mean reward."""
    for end in range(task.window, len(points) + 1):
        yield end - 1, mean(point.reward for point in points[end - task.window : end])


def is_over(cell: Cell, rows: Sequence[Row]) -> bool:
    at = reached(curve_of(rows), TASKS[cell.task])
    return at is not None and len(rows) > at + STEPS_AFTER_TARGET + cell.age


def result_of(cell: Cell, rows: Sequence[Row]) -> dict[str, Any]:
    """Return the figures of a run."""
    points, task = curve_of(rows), TASKS[cell.task]
    at = reached(points, task)
    best = max(reward for _, reward in windows(points, task))
    final = mean(point.reward for point in points[-LAST:])
    settled = [row["staleness/mean"] for row in rows[cell.age :]] or [rows[-1]["staleness/mean"]]
    every = max(1, math.ceil(len(points) / POINTS))
    chunks = [points[begin : begin + every] for begin in range(0, len(points), every)]
    return {
        "samples": None if at is None else round(points[at].samples),
        "wall_s": None if at is None else round(rows[round(points[at].step)]["progress/wall_s"], 1),
        "trained": int(rows[-1]["progress/samples"]),
        "steps": len(rows),
        "final": round(final, 3),
        "best": round(best, 3),
        "collapsed": final < COLLAPSE * best,
        "age": round(mean(settled), 2),
        "ess": round(mean(row["policy/ess"] for row in rows), 3),
        "bounded": round(mean(row["policy/clip_frac"] + row["policy/masked_frac"] for row in rows), 3),
        "curve": [[round(mean(p.step for p in chunk)), round(mean(p.reward for p in chunk), 3)] for chunk in chunks],
    }


def run(cell: Cell) -> dict[str, Any]:
    """Run a cell until it is over and return its line. Raises RuntimeError if the run fails."""
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="age_study_") as temporary:
        folder = Path(temporary)
        metrics, log = folder / "cell" / "metrics.jsonl", folder / "log"
        with log.open("w") as terminal:
            command = [Path(sys.executable).with_name("async-rl"), "run", *cell.words(folder)]
            process = subprocess.Popen(command, env=end_to_end.threads_of(1), stdout=terminal, stderr=subprocess.STDOUT)
            try:
                ended = wait(cell, process, metrics)
            finally:
                end_to_end.stop(process)
        rows = trained_rows(metrics)
        if (not ended and process.returncode != 0) or len(rows) < TASKS[cell.task].window:
            last_words = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
            raise RuntimeError(f"{cell.name} ended ({process.returncode}) after {len(rows)} steps:\n{last_words}")
        return {"cell": cell.name, **result_of(cell, rows), **facts(), "load": round(load, 1)}


def wait(cell: Cell, process: subprocess.Popen[bytes], metrics: Path) -> bool:
    """Wait until the run ends (False), or until it has shown what it should (True)."""
    deadline = time.monotonic() + GIVE_UP_S
    while process.poll() is None:
        if is_over(cell, trained_rows(metrics)):
            return True
        if time.monotonic() > deadline:
            raise RuntimeError(f"{cell.name} takes longer than {GIVE_UP_S:g} s")
        time.sleep(1.0)
    return False


def trained_rows(metrics: Path) -> list[dict[str, float]]:
    return [row for row in end_to_end.complete_rows(metrics) if "reward/mean" in row]


def facts() -> dict[str, Any]:
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "python": platform.python_version(),
        "torch": version("torch"),
        "megatron": version("megatron-core"),
        "cores": os.cpu_count(),
    }


def read(data: Path) -> dict[str, Line]:
    """Return the finished cells by name."""
    if not data.exists():
        return {}
    return {line["cell"]: line for line in map(json.loads, data.read_text().splitlines())}


def selected(patterns: Sequence[str]) -> list[Cell]:
    """Return the cells that match one of the patterns, which may leave out their last parts.

    Raises ValueError for a pattern that matches none.
    """
    for pattern in patterns:
        if not any(matches(cell, pattern) for cell in CELLS):
            raise ValueError(f"no cell matches {pattern!r}; cells are named as in {CELLS[0].name}")
    return [cell for cell in CELLS if not patterns or any(matches(cell, pattern) for pattern in patterns)]


def matches(cell: Cell, pattern: str) -> bool:
    return fnmatch(cell.name, pattern) or fnmatch(cell.name, pattern + "/*")


def collect(cells: Sequence[Cell], data: Path, *, minutes: float, run: Callable[[Cell], Line] = run) -> None:
    """Run the cells that `data` does not hold and append a line for each; start none after `minutes`."""
    begun = time.monotonic()
    missing = [cell for cell in cells if cell.name not in read(data)]
    for done, cell in enumerate(missing, start=1):
        if time.monotonic() - begun > 60 * minutes:
            print(f"{len(missing) - done + 1} cells are left for another call", file=sys.stderr)
            return
        line = run(cell)
        with data.open("a") as file:
            file.write(json.dumps(line, separators=(",", ":")) + "\n")
        print({name: value for name, value in line.items() if name != "curve"}, file=sys.stderr, flush=True)


COLUMNS = (
    "objective, learning rate",
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
    for objective, rate in series_of(task, found):
        fresh = {seed_of(line): numeric(line["samples"]) for line in lines_of(found, task, objective, 0, rate)}
        for age in AGES:
            lines = lines_of(found, task, objective, age, rate)
            if not lines:
                continue
            samples = [numeric(line["samples"]) for line in lines]
            pairs = [(numeric(line["samples"]), fresh.get(seed_of(line), math.inf)) for line in lines]
            ratios = [old / new for old, new in pairs if math.isfinite(new)]
            yield [
                f"`{objective}`, {rate:g}",
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


def series_of(task: str, found: Mapping[str, Line]) -> list[tuple[str, float]]:
    """Return the objectives and learning rates that a task has lines of."""
    series = dict.fromkeys((cell.objective, cell.learning_rate) for cell in CELLS if cell.task == task)
    return [(objective, rate) for objective, rate in series if any(lines_of(found, task, objective, age, rate) for age in AGES)]


def lines_of(found: Mapping[str, Line], task: str, objective: str, age: int, rate: float) -> list[Line]:
    prefix = f"{task}/{objective}/age{age}/lr{rate:g}/"
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
    for axis, (objective, rate) in zip(axes.flat, series, strict=False):
        for index, age in enumerate(AGES):
            for number, line in enumerate(lines_of(found, task, objective, age, rate)):
                label = f"max_age {age}" if number == 0 else None
                axis.plot(*zip(*line["curve"], strict=True), color=f"C{index}", linewidth=1, label=label)
        axis.axhline(TASKS[task].target, color="gray", linestyle="--", linewidth=0.8)
        axis.set_title(f"{objective}, {rate:g}", fontsize=9)
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


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="CELL", help="TASK/OBJECTIVE/ageN/lrX/seedN, or its beginning; * is any"
    )
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="start no cell after this many minutes (default: go on)"
    )
    parser.add_argument("--data", type=Path, default=DATA, help="the file with a line per finished cell")
    parser.add_argument("--report", action="store_true", help="run nothing: write the tables into the page, draw the plots")
    parser.add_argument("--list", action="store_true", help="run nothing: print the cells that are missing")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exception, so that the run is stopped as well
    try:
        cells = selected(args.only)
        if args.report:
            report(args.data, PAGE)
        elif args.list:
            print(*(cell.name for cell in cells if cell.name not in read(args.data)), sep="\n")
        else:
            collect(cells, args.data, minutes=args.minutes)
    except (ValueError, RuntimeError) as error:
        sys.exit(f"age_study: {error}")


if __name__ == "__main__":
    main()
