"""Measure what `staleness.pace` costs and buys: runs at fixed paces, at `auto`, and one step at a time.

Worlds: `demo` is the quickstart, `end_to_end` the task of end_to_end.py. In `latency` its episodes wait for their reward, in
`two_turns` they wait between the halves of the answer, in `bimodal` one answer in eight is four times as long.

A row has medians over the seeds: seconds per step and speed relative to `full`, with the smallest and the largest (of speed: in
pairs of the same seed); mean age of the trained groups and its part in the queue; seconds and steps until the mean reward of
five successive steps reaches 0.9 ("inf": never); the mean reward of the last ten steps; what holds the slots, in steps' worth
of groups (pace_parts/slots.py). With --data finished runs are lines of a file and are not run again.

    python benchmarks/pace.py --seeds 5 --paces sync 2 3 4 full auto --json result.json
    python benchmarks/pace.py --world latency --seeds 5 --paces 4 6 full auto --data docs/studies/pace.jsonl
    python benchmarks/pace.py --report --data docs/studies/pace.jsonl        # run nothing: a table for every world
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean, median
from typing import Any

import end_to_end
from pace_parts.slots import STATES, held_slots

REPOSITORY = Path(__file__).resolve().parents[1]
QUICKSTART = REPOSITORY / "configs" / "quickstart.yaml"
SYNC = "sync"
"""The pace of a run whose groups all have age 0: it generates, then it trains."""
DIGITS = {"latency": "WaitingDigits", "two_turns": "TwoTurnDigits", "bimodal": "UnevenDigits"}
WAITING = ("latency", "two_turns")
WORLDS = ("demo", "end_to_end", *DIGITS)
TARGET, WINDOW = 0.9, 5
WARM_UP = 20
"""Steps that do not count for speed and age: the pace is still being found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    step_s: float
    age: float
    age_in_queue: float
    target_s: float
    target_steps: float
    reward: float
    rolled_out: float
    """What holds the slots: pace_parts/slots.py."""
    ready: float
    taken: float
    trained: float
    pushed: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    world: str
    pace: str
    seed: int
    max_age: float

    def words(self, folder: Path) -> list[str]:
        """Return the arguments of `async-rl run`."""
        settings = {
            "run.folder": str(folder),
            "run.name": "run",
            "run.seed": str(self.seed),
            "staleness.max_age": str(self.max_age),
            "staleness.pace": self.pace,
        }
        if self.pace == SYNC:
            settings |= {"staleness.max_age": "0", "staleness.pace": "full"}
        if self.world in WAITING:  # enough groups may wait at the same time
            settings["worker.groups_in_flight"] = str(round(8 * (self.max_age + 1)))
        if self.world in DIGITS:
            environment = f"{REPOSITORY / 'benchmarks' / 'rivals' / 'waiting_digits.py'}:{DIGITS[self.world]}"
            settings["environments"] = json.dumps([{"type": environment}])
        config = QUICKSTART if self.world == "demo" else end_to_end.CONFIG
        return ["@", str(config), *(word for key, value in settings.items() for word in (f"--{key}", value))]


def measure(run: Run) -> Result:
    with tempfile.TemporaryDirectory(prefix="pace_") as folder:
        log = Path(folder) / "log"
        command = [Path(sys.executable).with_name("async-rl"), "run", *run.words(Path(folder))]
        with log.open("w") as terminal:
            ended = subprocess.run(command, env=end_to_end.threads_of(1), stdout=terminal, stderr=terminal)
        if ended.returncode != 0:
            raise SystemExit(f"pace: {run} ended with exit code {ended.returncode}:\n{log.read_text()[-2000:]}")
        rows = end_to_end.complete_rows(Path(folder) / "run" / "metrics.jsonl")
        slots = held_slots(Path(folder) / "run", since_step=WARM_UP)
    return result_of([row for row in rows if "reward/mean" in row], slots)


def result_of(steps: list[dict[str, float]], slots: Mapping[str, float]) -> Result:
    settled, rewards = steps[WARM_UP:], [step["reward/mean"] for step in steps]
    reached = (last for last in range(WINDOW, len(steps) + 1) if mean(rewards[last - WINDOW : last]) >= TARGET)
    target = next(reached, None)
    return Result(
        step_s=(settled[-1]["progress/wall_s"] - settled[0]["progress/wall_s"]) / (len(settled) - 1),
        age=mean(step["staleness/mean"] for step in settled),
        age_in_queue=mean(step["staleness/in_queue"] for step in settled),
        target_s=steps[target - 1]["progress/wall_s"] if target else math.inf,
        target_steps=target or math.inf,
        reward=mean(rewards[-10:]),
        **slots,
    )


def asked(world: str, paces: Sequence[str], seeds: int, max_age: float) -> list[Run]:
    """Return a run at each pace per seed, in turn, so that a change in the machine's load affects all paces."""
    return [Run(world=world, pace=pace, seed=seed, max_age=max_age) for seed in range(1, seeds + 1) for pace in paces]


def collect(runs: Iterable[Run], data: Path) -> None:
    """Run what `data` does not hold, and append a line for each."""
    done = read(data)
    for run in runs:
        if run in done:
            continue
        load = os.getloadavg()[0]
        result = measure(run)
        line: dict[str, Any] = asdict(run) | asdict(result) | {"date": f"{datetime.now(UTC):%Y-%m-%d}", "load": round(load, 1)}
        with data.open("a") as file:
            file.write(json.dumps(line, separators=(",", ":")) + "\n")
        print(f"{run.world}  seed {run.seed}  pace {run.pace:>5}  {result}", file=sys.stderr, flush=True)


def read(data: Path) -> dict[Run, Result]:
    lines = [json.loads(line) for line in data.read_text().splitlines()] if data.exists() else []
    return {
        Run(**{name: line[name] for name in Run.__dataclass_fields__}): Result(
            **{name: line[name] for name in Result.__dataclass_fields__}
        )
        for line in lines
    }


def medians(results: Sequence[Result]) -> dict[str, float]:
    return {name: median(asdict(result)[name] for result in results) for name in Result.__dataclass_fields__}


def spread(figures: Sequence[float], digits: int) -> str:
    """Return the smallest and the largest in brackets, or nothing where there is one."""
    return f" ({min(figures):.{digits}f} to {max(figures):.{digits}f})" if len(figures) > 1 else ""


def print_table(found: Mapping[str, Mapping[int, Result]]) -> dict[str, float]:
    """Print a row for every pace and return the medians by field. `found`: the runs of each pace by seed."""
    columns = {pace: medians([*results.values()]) for pace, results in found.items()}
    full_s, full = columns.get("full", {}).get("step_s", math.nan), found.get("full", {})
    print(
        "| pace | runs | s a step | speed / full | mean age | in queue | s to 0.9 | steps | last reward | slots: "
        + ", ".join(STATES)
        + " |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for pace, column in columns.items():
        took_s = [result.step_s for result in found[pace].values()]
        speeds = [full[seed].step_s / result.step_s for seed, result in found[pace].items() if seed in full]
        print(
            f"| {pace} | {len(found[pace])} | {column['step_s']:.3f}{spread(took_s, 3)} "
            f"| {full_s / column['step_s']:.2f}{spread(speeds, 2) if pace != 'full' else ''} "
            f"| {column['age']:.2f} | {column['age_in_queue']:.2f} "
            f"| {column['target_s']:.1f} | {column['target_steps']:.0f} | {column['reward']:.3f} "
            f"| {', '.join(f'{column[state]:.1f}' for state in STATES)} |"
        )
    return {f"pace_{pace}_{field}": value for pace, column in columns.items() for field, value in column.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", choices=WORLDS, default="demo", help="what is trained (default: demo)")
    parser.add_argument("--seeds", type=int, default=1, help="runs at each pace; medians are reported (default: 1)")
    parser.add_argument("--paces", nargs="+", default=["2", "3", "4", "full", "auto"], help="numbers, full, auto, sync")
    parser.add_argument("--max-age", type=float, default=8, help="the bound (default: 8)")
    parser.add_argument("--data", type=Path, help="a file with a line per finished run (default: nothing is kept)")
    parser.add_argument("--report", action="store_true", help="run nothing: print the tables of what is there")
    parser.add_argument("--json", type=Path, help="also write the medians there")
    args = parser.parse_args()
    end_to_end.exit_on_sigterm()
    if args.report and args.data is None:
        parser.error("--report needs --data FILE, where finished runs are kept")
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as unkept:
        data = args.data if args.data is not None else Path(unkept) / "runs.jsonl"
        if not args.report:
            collect(asked(args.world, args.paces, args.seeds, args.max_age), data)
        found = read(data)
    figures: dict[str, float] = {"seeds": args.seeds, "max_age": args.max_age, "load_before": load}
    for world in WORLDS if args.report else [args.world]:
        results: defaultdict[str, dict[int, Result]] = defaultdict(dict)
        for run, result in found.items():
            if run.world == world and run.max_age == args.max_age and (args.report or run.pace in args.paces):
                results[run.pace][run.seed] = result
        if results:
            print(f"\n{world}, max_age {args.max_age:g}\n")
            found_here = print_table(results)
            figures |= {f"{world}_{name}": value for name, value in found_here.items()} if args.report else found_here
    if args.json is not None:
        args.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
