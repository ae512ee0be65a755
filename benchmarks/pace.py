"""Measure what `staleness.pace` costs and buys: the quickstart at fixed paces and at `auto`, with a generous bound on age.

A row has medians over the seeds: seconds per step, mean age of the trained groups and its part in the queue, seconds and steps
until the mean reward of five successive steps reaches 0.9 ("never" counts as infinite), the mean reward of the last ten steps.

    python benchmarks/pace.py --seeds 3 --paces 2 3 4 full auto --json result.json
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
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median

REPOSITORY = Path(__file__).resolve().parents[1]
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


def run(pace: str, seed: int, folder: Path, overrides: list[str]) -> Result:
    name = f"pace-{pace.replace('.', '_')}-{seed}"
    settings = {"run.folder": str(folder), "run.name": name, "run.seed": str(seed), "staleness.pace": pace}
    words = [word for key, value in settings.items() for word in (f"--{key}", value)]
    command = [Path(sys.executable).with_name("async-rl"), "run", "@", REPOSITORY / "configs" / "quickstart.yaml"]
    with (folder / f"{name}.log").open("w") as log:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.run([*command, *words, *overrides], env=environment, stdout=log, stderr=log, check=True)
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    return measured([row for row in rows if "reward/mean" in row])


def measured(steps: list[dict[str, float]]) -> Result:
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
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1, help="runs at each pace; medians are reported (default: 1)")
    parser.add_argument("--paces", nargs="+", default=["2", "3", "4", "full", "auto"])
    parser.add_argument("--max-age", type=float, default=8, help="the bound (default: 8)")
    parser.add_argument("--json", type=Path, help="also write the medians there")
    parser.add_argument("--with", dest="overrides", nargs="*", default=[], help="further --KEY VALUE words for the runs")
    args = parser.parse_args()
    found: dict[str, list[Result]] = defaultdict(list)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(1, args.seeds + 1):
            for pace in args.paces:
                bound = ["--staleness.max_age", str(args.max_age)]
                found[pace].append(run(pace, seed, Path(folder), [*bound, *args.overrides]))
                print(f"seed {seed}  pace {pace:>5}  {found[pace][-1]}", file=sys.stderr, flush=True)
    fastest = min(median(result.step_s for result in results) for results in found.values())
    print(f"{'pace':>5}  {'s/step':>7} {'speed':>6} {'age':>5} {'queue':>6} {'s to 0.9':>9} {'steps':>6} {'reward':>7}")
    figures: dict[str, float] = {"seeds": args.seeds, "max_age": args.max_age, "load_before": load}
    for pace, results in found.items():
        column = {name: median(asdict(result)[name] for result in results) for name in asdict(results[0])}
        print(
            f"{pace:>5}  {column['step_s']:7.3f} {fastest / column['step_s']:6.3f} {column['age']:5.2f} "
            f"{column['age_in_queue']:6.2f} {column['target_s']:9.1f} {column['target_steps']:6.0f} {column['reward']:7.3f}"
        )
        figures |= {f"pace_{pace}_{field}": value for field, value in column.items()}
    if args.json is not None:
        args.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
