"""Compare what `async-rl simulate` predicts with runs of the quickstart: two workers, one worker, episodes that wait.

Each round runs the three, one after the other, and predicts all of them from the rates of its first run alone. A finished run
is kept in --folder, so that the command goes on where it was stopped; --report prints the table of what is there.

    python benchmarks/simulate.py --rounds 5 --json result.json      # 5 minutes a round
    python benchmarks/simulate.py --folder runs/simulate --report
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from learner.simulation.calibration import calibrated
from learner.simulation.prediction import Machines, predict
from learner.simulation.rates import Rates
from learner.simulation.recorded import RecordedRun, read_run

REPOSITORY = Path(__file__).resolve().parents[1]
QUICKSTART = REPOSITORY / "configs" / "quickstart.yaml"
WAIT_S = 0.4
"""Median of what an episode waits in the third configuration."""
SIBLINGS = 16
"""`batch.group_size` of the quickstart."""
_WAITING = {
    "type": f"{REPOSITORY / 'benchmarks' / 'rivals' / 'waiting_digits.py'}:WaitingDigits",
    "args": {"max_tokens": 12, "median_s": WAIT_S, "sigma": 1.0},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A configuration of the quickstart."""

    settings: dict[str, str]
    wait_s: float = 0.0

    def rates(self, base: Rates) -> Rates:
        return base.with_waits(self.wait_s, siblings=SIBLINGS) if self.wait_s else base


BASE = "two workers"
CASES = {
    BASE: Case(settings={"worker.processes": "2"}),
    "one worker": Case(settings={"worker.processes": "1"}),
    "waiting episodes": Case(
        settings={
            "environments": json.dumps([_WAITING]),
            "staleness.max_age": "8",
            "worker.processes": "2",
            "worker.groups_in_flight": "36",
            "batch.drop_no_signal": "false",
        },
        wait_s=WAIT_S,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A run beside its prediction."""

    step_s: float
    predicted_s: float
    age: float
    predicted_age: float


def play(name: str, number: int, folder: Path, steps: int) -> Path:
    """Run a case unless it was run already, and return its folder."""
    run, done = folder / slug(name, number), folder / f"{slug(name, number)}.done"
    if not done.exists():
        flags = [f"--{key}={value}" for key, value in CASES[name].settings.items()]
        own = [f"--run.folder={folder}", f"--run.name={run.name}", f"--run.seed={number}", f"--learner.steps={steps}"]
        command = [Path(sys.executable).with_name("async-rl"), "run", "@", QUICKSTART, *own, *flags]
        with (folder / f"{run.name}.log").open("w") as log:
            subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=log, stderr=log, check=True)
        done.touch()
    return run


def compared(runs: dict[str, RecordedRun], cores: int) -> dict[str, Pair]:
    """Predict every run of a round from the rates of its first."""
    base = calibrated(runs[BASE], cores=cores)
    found: dict[str, Pair] = {}
    for name, run in runs.items():
        rates = CASES[name].rates(replace(base, dropped=run.rates.dropped))  # depends on the policy, not on the fleet
        said = predict(run.config, rates, Machines(cores=cores), workers=run.workers)
        found[name] = Pair(step_s=run.step_s, predicted_s=said.step_s, age=run.age, predicted_age=said.age)
    return found


def finished_rounds(folder: Path) -> Iterator[dict[str, RecordedRun]]:
    numbers = sorted(int(done.stem.rpartition("-")[2]) for done in folder.glob("two-workers-*.done"))
    for number in numbers:
        if all((folder / f"{slug(name, number)}.done").exists() for name in CASES):
            yield {name: read_run(folder / slug(name, number)) for name in CASES}


def slug(name: str, number: int) -> str:
    return f"{name.replace(' ', '-')}-{number}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="rounds in all, those of earlier calls included (default: 5)")
    parser.add_argument("--steps", type=int, default=120, help="steps of a run (default: 120)")
    parser.add_argument("--folder", type=Path, default=REPOSITORY / "runs" / "simulate", help="where the runs are kept")
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument("--json", type=Path, help="also write the medians there")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    for number in range(1, args.rounds + 1) if not args.report else ():
        for name in CASES:
            play(name, number, args.folder.absolute(), args.steps)
    rounds = [compared(runs, cores) for runs in finished_rounds(args.folder)]
    if not rounds:
        raise SystemExit(f"{args.folder} has no finished round")
    print(f"{'':<18} {'s/step':>8} {'predicted':>10} {'error':>7} {'age':>6} {'predicted':>10}   ({len(rounds)} rounds)")
    figures: dict[str, float] = {"rounds": len(rounds), "cores": cores, "load_before": load}
    for name in CASES:
        column = {field: median(getattr(each[name], field) for each in rounds) for field in Pair.__dataclass_fields__}
        errors = [each[name].predicted_s / each[name].step_s - 1 for each in rounds]
        print(
            f"{name:<18} {column['step_s']:8.3f} {column['predicted_s']:10.3f} {median(errors):+7.0%} "
            f"{column['age']:6.2f} {column['predicted_age']:10.2f}   errors {min(errors):+.0%} to {max(errors):+.0%}"
        )
        figures |= {f"{name.replace(' ', '_')}_{field}": value for field, value in (column | {"error": median(errors)}).items()}
    if args.json is not None:
        args.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
