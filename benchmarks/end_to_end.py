"""Measure time and samples until the even-digits task is learned: async_rl compared with TRL's GRPOTrainer.

Both get the same two cores, task, model, batch and optimizer (configs/end_to_end.yaml) and stop by the same rule: the mean
reward of three successive steps reaches 0.9. Starting up is not counted on either side.

    python benchmarks/end_to_end.py --seeds 5 --json result.json
    python benchmarks/end_to_end.py --latency --seeds 3      # every episode waits for its reward, 0.4 s in the median
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import yaml
from rivals.virtual_env import python_of

from async_rl.config import CharacterTokenizer, Config

REPOSITORY = Path(__file__).resolve().parents[1]
CONFIG = REPOSITORY / "configs" / "end_to_end.yaml"
RUNS = REPOSITORY / "runs" / "end_to_end"
TARGET = 0.9
WINDOW = 3
CORES = 2
GIVE_UP_S = 900.0
DRAIN_S = 60.0
LOOK_EVERY_S = 0.2  # the run is another process, and its metrics file gives no event to wait on


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Time, samples and steps until the target."""

    wall_s: float
    """From the first weights that could be sampled from to the end of the step that reached the target."""
    samples: int
    """Completions trained on."""
    steps: int


class NotReached(Exception):
    """A side ended without reaching the target, so nothing can be compared."""


def reached(rows: Sequence[dict[str, float]]) -> Result | None:
    """Apply the stop rule to the rows of a metrics.jsonl."""
    steps = [row for row in rows if "reward/mean" in row]
    for last in range(WINDOW, len(steps) + 1):
        window = steps[last - WINDOW : last]
        if sum(row["reward/mean"] for row in window) / WINDOW >= TARGET:
            row = window[-1]
            return Result(wall_s=row["progress/wall_s"], samples=int(row["progress/samples"]), steps=last)
    return None


def complete_rows(metrics: Path) -> list[dict[str, float]]:
    """Return the rows written so far, without an unfinished last line."""
    if not metrics.exists():
        return []
    return [json.loads(line) for line in metrics.read_text().split("\n")[:-1]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Episodes wait for their reward, a lognormal time."""

    median_s: float
    max_age: float
    sigma: float = 1.0

    def overrides(self, config: Config) -> list[str]:
        """Return what changes in our run: the environment waits, and enough groups may wait at the same time."""
        [environment] = config.environments
        waiting = {
            "type": f"{REPOSITORY / 'benchmarks' / 'rivals' / 'waiting_digits.py'}:WaitingDigits",
            "args": {**environment.args, "median_s": self.median_s, "sigma": self.sigma},
        }
        settings = {
            "environments": json.dumps([waiting]),
            "staleness.max_age": self.max_age,
            "worker.groups_in_flight": round(config.batch.groups_per_step * (self.max_age + 1)),
        }
        return [str(word) for key, value in settings.items() for word in (f"--{key}", value)]

    @property
    def flags(self) -> list[str]:
        """TRL's."""
        return [f"--wait-median={self.median_s}", f"--wait-sigma={self.sigma}"]


def run_ours(command: Sequence[str | Path], runs: Path, seed: int, overrides: Sequence[str] = ()) -> Result:
    """Start `async-rl run`, watch its metrics until the target is reached, then ask it to drain."""
    name = f"{datetime.now(UTC):%Y%m%d-%H%M%S}-seed{seed}"
    runs.mkdir(parents=True, exist_ok=True)
    log = runs / f"{name}.log"  # beside the run's folder, which the run creates
    arguments = ["run", "@", CONFIG, "--run.folder", runs, "--run.name", name, "--run.seed", str(seed), *overrides]
    with log.open("w") as terminal:
        run = subprocess.Popen([*command, *arguments], env=threads_of(1), stdout=terminal, stderr=subprocess.STDOUT)
        try:
            result = watch(run, runs / name / "metrics.jsonl")
        finally:
            stop(run)
    if result is None:
        last_words = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
        raise NotReached(f"async_rl ended ({run.returncode}) before reward {TARGET}; {log} ends with:\n{last_words}")
    return result


def watch(run: subprocess.Popen[bytes], metrics: Path) -> Result | None:
    deadline = time.monotonic() + GIVE_UP_S
    while True:
        is_last_look = run.poll() is not None or time.monotonic() > deadline
        result = reached(complete_rows(metrics))
        if result is not None or is_last_look:
            return result
        time.sleep(LOOK_EVERY_S)


def exit_on_sigterm() -> None:
    """Make SIGTERM an exception, so that child processes are stopped as well."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def stop(run: subprocess.Popen[bytes]) -> None:
    run.terminate()
    try:
        run.wait(DRAIN_S)
    except subprocess.TimeoutExpired:
        run.kill()
        run.wait()


def run_trl(python: Path, config: Config, seed: int, threads: int, more: Sequence[str]) -> Result:
    flags = [*shared_facts(config), *more, f"--seed={seed}", f"--threads={threads}", f"--target={TARGET}", f"--window={WINDOW}"]
    command = [python, REPOSITORY / "benchmarks" / "rivals" / "trl_grpo.py", *flags]
    run = subprocess.run(command, env=threads_of(threads), capture_output=True, text=True, timeout=GIVE_UP_S)
    if run.returncode != 0:
        raise NotReached(f"TRL failed with exit code {run.returncode}:\n{run.stderr[-2000:]}")
    found = json.loads(run.stdout)
    if not found["reached"]:
        raise NotReached(f"TRL ended after {found['steps']} steps at reward {found['rewards'][-1]:.2f}, below {TARGET}")
    return Result(wall_s=found["wall_s"], samples=found["samples"], steps=found["steps"])


def shared_facts(config: Config) -> list[str]:
    """Return the shared settings as TRL's flags."""
    size, optimizer, tokenizer = config.model.size, config.learner.optimizer, config.tokenizer
    assert size is not None, "TRL's model is built from model.size"
    assert isinstance(tokenizer, CharacterTokenizer), "TRL's tokenizer is one of characters"
    facts = {
        "steps": config.learner.steps,
        "alphabet": tokenizer.alphabet,
        "hidden": size.hidden,
        "layers": size.layers,
        "heads": size.heads,
        "ffn": size.ffn if size.ffn is not None else 4 * size.hidden,
        "max-positions": size.max_positions,
        "prompts": config.batch.groups_per_step,
        "group-size": config.batch.group_size,
        "max-tokens": config.sampling.max_tokens,
        "temperature": config.sampling.temperature,
        "learning-rate": optimizer.learning_rate,
        "clip-grad": optimizer.clip_grad,
    }
    return [f"--{name}={value}" for name, value in facts.items()]


def threads_of(count: int) -> dict[str, str]:
    """Return the environment of a child process with `count` threads that downloads nothing."""
    return {**os.environ, "OMP_NUM_THREADS": str(count), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def keep_to_cores() -> None:
    """Bind this process and its children to CORES cores, so that machines with more cores give the same figures."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])


def medians(results: Sequence[Result]) -> Result:
    return Result(
        wall_s=statistics.median(result.wall_s for result in results),
        samples=round(statistics.median(result.samples for result in results)),
        steps=round(statistics.median(result.steps for result in results)),
    )


def compare(ours: Sequence[Result], theirs: Sequence[Result]) -> dict[str, float]:
    """Return one flat object of medians over the seeds and their ratios; without a rival, only ours."""
    found = asdict(medians(ours))
    if theirs:
        trl = medians(theirs)
        found |= {f"trl_{name}": value for name, value in asdict(trl).items()}
        found["wall_vs_trl"] = found["wall_s"] / trl.wall_s
        found["samples_vs_trl"] = found["samples"] / trl.samples
    return found


def show(name: str, seed: int, result: Result) -> None:
    print(f"seed {seed}  {name:<9}{result.wall_s:7.1f} s {result.samples:7d} samples {result.steps:5d} steps", flush=True)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1, help="runs of each side; medians are reported (default: 1)")
    parser.add_argument("--rival", action=argparse.BooleanOptionalAction, default=True, help="also run TRL (default: yes)")
    parser.add_argument("--rival-threads", type=int, default=CORES, help=f"torch threads of TRL (default: {CORES})")
    parser.add_argument(
        "--latency", type=float, nargs="?", const=0.4, metavar="SECONDS", help="median wait of an episode (default: 0.4)"
    )
    parser.add_argument("--max-age", type=float, default=8, help="ours with --latency (default: 8)")
    parser.add_argument("--json", type=Path, help="where to write one flat object")
    args = parser.parse_args()
    if args.seeds < 1:
        parser.error("--seeds must be at least 1")
    return args


def main() -> None:
    args = parse_args()
    exit_on_sigterm()
    config = Config.model_validate(yaml.safe_load(CONFIG.read_text()))
    async_rl = Path(sys.executable).with_name("async-rl")
    trl = python_of("trl") if args.rival else None
    load = os.getloadavg()[0]
    keep_to_cores()
    latency = Latency(median_s=args.latency, max_age=args.max_age) if args.latency is not None else None
    overrides, flags = (latency.overrides(config), latency.flags) if latency is not None else ([], [])
    ours: list[Result] = []
    theirs: list[Result] = []
    try:
        for seed in range(args.seeds):  # in turn, so that a change in the machine's load affects both
            ours.append(run_ours([async_rl], RUNS, seed, overrides))
            show("async_rl", seed, ours[-1])
            if trl is not None:
                theirs.append(run_trl(trl, config, seed, args.rival_threads, flags))
                show("TRL", seed, theirs[-1])
    except NotReached as error:
        sys.exit(f"end_to_end: {error}")
    found = compare(ours, theirs)
    if theirs:
        print(f"async_rl / TRL: {found['wall_vs_trl']:.2f} x the wall time, {found['samples_vs_trl']:.2f} x the samples")
    if args.json is not None:
        facts = {"target": TARGET, "seeds": args.seeds, "cores": CORES, "trl_threads": args.rival_threads, "load_before": load}
        facts |= asdict(latency) if latency is not None else {}
        args.json.write_text(json.dumps(found | facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
