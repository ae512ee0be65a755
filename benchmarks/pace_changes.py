"""Change a fleet in mid-run, and measure how many steps later `staleness.pace: auto` has settled.

`lost`: one of two workers drains. `joined`: a second worker joins the first. `slow`: tools take ten times as long. In each run
the change comes after step 60 of 160; the settled pace is the mean of the last 40 steps.

    python benchmarks/pace_changes.py --rounds 3 --json result.json      # two minutes a round
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean, median

import end_to_end
import pace

CHANGES = ("lost", "joined", "slow")
CHANGE_AT, STEPS, LAST = 60, 160, 40
SMOOTHED = 6
"""Steps over which the pace is averaged; single steps vary."""
COMMAND = Path(sys.executable).with_name("async-rl")
GIVE_UP_S = 600.0


def settled_after(paces: Sequence[float]) -> int:
    """Return the steps after which the smoothed pace stays within 1 (or a quarter) of the mean of the last steps."""
    final = fmean(paces[-LAST:])
    within = max(1.0, 0.25 * final)
    smoothed = [fmean(paces[first : first + SMOOTHED]) for first in range(len(paces) - SMOOTHED + 1)]
    outside = [first for first, value in enumerate(smoothed) if abs(value - final) > within]
    return outside[-1] + 1 if outside else 0


def words_of(change: str, folder: Path, seed: int) -> list[str]:
    """Return the arguments of `async-rl run`."""
    settings = {
        "run.folder": str(folder),
        "run.name": "run",
        "run.seed": str(seed),
        "learner.steps": str(STEPS),
        "staleness.max_age": "8",
        "batch.drop_no_signal": "false",  # or tasks that are solved would change the fleet's speed as well
    }
    if change == "slow":
        environment = f"{pace.REPOSITORY / 'benchmarks' / 'rivals' / 'waiting_digits.py'}:WaitingDigits"
        args = {"max_tokens": 12, "median_s": 0.02, "slow_file": str(folder / "slow")}
        settings |= {"environments": json.dumps([{"type": environment, "args": args}]), "worker.groups_in_flight": "36"}
    else:
        settings["worker.processes"] = "2" if change == "lost" else "1"
    return ["@", str(pace.QUICKSTART), *(word for key, value in settings.items() for word in (f"--{key}", value))]


def measure(change: str, seed: int) -> list[float]:
    """Run until the end; return the pace of every step."""
    environment = end_to_end.threads_of(1)
    with tempfile.TemporaryDirectory(prefix="pace_") as temporary, ExitStack() as started:
        folder = Path(temporary)
        log = started.enter_context((folder / "log").open("w"))
        words = words_of(change, folder, seed)
        run = subprocess.Popen([COMMAND, "run", *words], env=environment, stdout=log, stderr=log)
        started.callback(end_to_end.stop, run)
        metrics, config = folder / "run" / "metrics.jsonl", f"{folder / 'run' / 'config.yaml'}"
        wait_for(metrics, CHANGE_AT, run)
        if change == "lost":
            listed = subprocess.run([COMMAND, "fleet", "ls", "@", config], env=environment, check=True, stdout=subprocess.PIPE)
            worker = listed.stdout.decode().splitlines()[-1].split()[0]  # the learner comes first
            subprocess.run([COMMAND, "fleet", "drain", worker, "@", config], env=environment, check=True, stdout=log)
        elif change == "joined":
            second = subprocess.Popen([COMMAND, "worker", "@", config], env=environment, stdout=log, stderr=log)
            started.callback(end_to_end.stop, second)
        else:
            (folder / "slow").touch()
        wait_for(metrics, STEPS, run)
        return [row["pace/target"] for row in end_to_end.complete_rows(metrics) if "pace/target" in row]


def wait_for(metrics: Path, step: int, run: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + GIVE_UP_S
    while sum("pace/target" in row for row in end_to_end.complete_rows(metrics)) < step:
        if run.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"pace_changes: step {step} was not reached (exit code {run.poll()})")
        time.sleep(end_to_end.LOOK_EVERY_S)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1, help="runs of each change; medians are reported (default: 1)")
    parser.add_argument("--changes", nargs="+", choices=CHANGES, default=CHANGES)
    parser.add_argument("--json", type=Path, help="where to write one flat object")
    args = parser.parse_args()
    end_to_end.exit_on_sigterm()
    figures: dict[str, float] = {"rounds": args.rounds, "load_before": os.getloadavg()[0]}
    found: dict[str, list[list[float]]] = {change: [] for change in args.changes}
    for seed in range(1, args.rounds + 1):
        for change in args.changes:
            found[change].append(measure(change, seed))
    print(f"{'':<8} {'before':>7} {'after':>7} {'settled after':>14}   ({args.rounds} rounds)")
    for change, runs in found.items():
        before = median(fmean(paces[CHANGE_AT - LAST : CHANGE_AT]) for paces in runs)
        after = median(fmean(paces[-LAST:]) for paces in runs)
        steps = [settled_after(paces[CHANGE_AT:]) for paces in runs]
        print(f"{change:<8} {before:7.2f} {after:7.2f} {median(steps):8.0f} steps   {steps}")
        figures |= {f"{change}_before": before, f"{change}_after": after, f"{change}_steps": median(steps)}
    if args.json is not None:
        args.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
