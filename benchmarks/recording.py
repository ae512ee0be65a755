"""Measure what the recording of events and rollouts costs: the quickstart with and without it, in turn.

The cost is in CPU time of all processes per step, which a busy machine hardly changes, unlike wall time. What processes need to
start is measured by a run of one step and left out. The last line has the ratio of the medians: 1.01 is 1 % more.

    python benchmarks/recording.py --pairs 3 --json result.json
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

REPOSITORY = Path(__file__).resolve().parents[1]
OFF = ["--recording.events_mb", "0", "--recording.rollouts_mb", "0"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """CPU seconds per step."""

    without: float
    recorded: float

    @property
    def ratio(self) -> float:
        return self.recorded / self.without


def cpu_of_run(folder: Path, name: str, steps: int, words: list[str]) -> float:
    """Run the quickstart and return the CPU seconds of all its processes."""
    command = [Path(sys.executable).with_name("async-rl"), "run", "@", REPOSITORY / "configs" / "quickstart.yaml"]
    settings = {"run.folder": str(folder), "run.name": name, "learner.steps": str(steps), "metrics.console": "false"}
    overrides = [word for key, value in settings.items() for word in (f"--{key}", value)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with (folder / f"{name}.log").open("w") as log:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.run([*command, *overrides, *words], env=environment, stdout=log, stderr=log, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=3, help="runs with and without (default: 3)")
    parser.add_argument("--steps", type=int, default=160, help="optimizer steps of a run (default: 160)")
    parser.add_argument("--json", type=Path, help="also write the result there")
    args = parser.parse_args()
    pairs: list[Pair] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        start_s = min(cpu_of_run(folder, f"start-{turn}", 1, OFF) for turn in range(2))
        for turn in range(args.pairs):
            spent: dict[str, float] = {}
            # In turn, so that neither always comes first.
            for kind in ("without", "recorded") if turn % 2 == 0 else ("recorded", "without"):
                cpu_s = cpu_of_run(folder, f"{kind}-{turn}", args.steps, OFF if kind == "without" else [])
                spent[kind] = (cpu_s - start_s) / (args.steps - 1)
            pairs.append(Pair(**spent))
            shown = f"{pairs[-1].without * 1000:.1f} ms without, {pairs[-1].recorded * 1000:.1f} ms recorded"
            print(f"pair {turn + 1}: {shown}, ratio {pairs[-1].ratio:.4f}", flush=True)
        size = sum(file.stat().st_size for file in (folder / "recorded-0").glob("*/learner-*"))
    ratio = median(pair.recorded for pair in pairs) / median(pair.without for pair in pairs)
    print(f"recorded {size / 1e6:.2f} MB in {args.steps} steps")
    print(f"ratio {ratio:.4f} (medians of {len(pairs)} pairs; CPU time per step of all processes, without their start)")
    if args.json is not None:
        found = {"ratio": ratio, "pairs": [asdict(pair) for pair in pairs], "recorded_bytes": size, "steps": args.steps}
        args.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
