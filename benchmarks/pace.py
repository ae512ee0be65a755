"""Measure what `staleness.pace` costs and buys: a run at fixed paces and at `auto`, with a generous bound on age.

Worlds: `demo` is the quickstart, `end_to_end` the task of end_to_end.py, `latency` the same where episodes wait for a reward.

A row has medians over the seeds: seconds per step, mean age of the trained groups and its part in the queue, seconds and steps
until the mean reward of five successive steps reaches 0.9 ("never" counts as infinite), the mean reward of the last ten steps.

    python benchmarks/pace.py --seeds 5 --paces 2 3 4 full auto --json result.json
    python benchmarks/pace.py --world latency --seeds 5 --paces 4 6 full auto
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

import end_to_end
import yaml

from async_rl.config import Config

REPOSITORY = Path(__file__).resolve().parents[1]
QUICKSTART = REPOSITORY / "configs" / "quickstart.yaml"
WORLDS = ("demo", "end_to_end", "latency")
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


def words_of(world: str, max_age: float) -> list[str]:
    """Return what `async-rl run` is given for a world."""
    if world == "latency":
        config = Config.model_validate(yaml.safe_load(end_to_end.CONFIG.read_text()))
        return ["@", str(end_to_end.CONFIG), *end_to_end.Latency(median_s=0.4, max_age=max_age).overrides(config)]
    return ["@", str(QUICKSTART if world == "demo" else end_to_end.CONFIG), "--staleness.max_age", str(max_age)]


def run(pace: str, seed: int, folder: Path, world: list[str]) -> Result:
    name = f"pace-{pace.replace('.', '_')}-{seed}"
    settings = {"run.folder": str(folder), "run.name": name, "run.seed": str(seed), "staleness.pace": pace}
    words = [word for key, value in settings.items() for word in (f"--{key}", value)]
    command = [Path(sys.executable).with_name("async-rl"), "run", *world]
    with (folder / f"{name}.log").open("w") as log:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.run([*command, *words], env=environment, stdout=log, stderr=log, check=True)
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
    parser.add_argument("--world", choices=WORLDS, default="demo", help="what is trained (default: demo)")
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
                found[pace].append(run(pace, seed, Path(folder), [*words_of(args.world, args.max_age), *args.overrides]))
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
