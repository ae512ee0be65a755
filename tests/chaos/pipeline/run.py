"""Injects faults into whole real runs by a seeded plan, and audits each with `async-rl audit`.

    make chaos FAULTS=500 SEED=1
    make chaos FAULTS=500 SEED=1 WITH="--round 7 --keep FOLDER"       only that round, and keeps its folder
    make chaos WITH=--few                                             the eight fixed faults of the tests

Exit code 1 if a run stalled or an audit is not clean; then the folders are kept and printed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from async_rl.errors import ConfigError, boundary
from tests.chaos.pipeline.plan import few, rounds
from tests.chaos.pipeline.rounds import Outcome, play
from tests.chaos.recovery import as_lines, summed


def main(words: Sequence[str] = sys.argv[1:]) -> int:
    wanted = _arguments(words)
    plans = few(wanted.seed) if wanted.few else rounds(wanted.seed, wanted.faults)
    root = Path(wanted.keep if wanted.keep is not None else tempfile.mkdtemp(prefix="chaos-"))
    done: list[Outcome] = []
    for plan in plans:
        if wanted.round not in (None, plan.round):
            continue
        folder = root / f"round-{plan.round:03d}"
        if folder.exists():
            raise ConfigError(f"{folder} exists already; give --keep a new folder")
        folder.mkdir(parents=True)
        print(f"round {plan.round}: {plan.pipeline.name}", file=sys.stderr, flush=True)
        done.append(play(plan, folder))
        print(f"round {plan.round}: {done[-1].sentence}", file=sys.stderr, flush=True)
        if done[-1].is_sound and wanted.keep is None:
            shutil.rmtree(folder)
    command = f"make chaos FAULTS={wanted.faults} SEED={wanted.seed}"
    print(_table(done, command))
    if wanted.report is not None:
        wanted.report.parent.mkdir(parents=True, exist_ok=True)
        wanted.report.write_text(json.dumps(_as_json(done, command), indent=1))
    if all(each.is_sound for each in done):
        if wanted.keep is None:
            root.rmdir()
        return 0
    print(f"run folders and output: {root}")
    return 1


def _table(done: Sequence[Outcome], command: str) -> str:
    kinds = Counter(str(each["kind"]) for outcome in done for each in outcome.struck)
    lines = ["", *(f"{kind:<20} {times:4d} times" for kind, times in sorted(kinds.items())), ""]
    lines += as_lines(summed(each.recovery_s for each in done))
    lines += ["", f"{sum(kinds.values())} faults in {sum(each.seconds for each in done):.0f} s, {len(done)} runs"]
    lines += [f"run {each.plan.round} ended by itself: {ending}" for each in done for ending in each.endings]
    lines += [f"run {each.plan.round}: {each.sentence}" for each in done if not each.is_sound]
    clean = sum(each.is_sound for each in done)
    return "\n".join([*lines, f"{clean} of {len(done)} runs are clean", f"again: {command}"])


def _as_json(done: Sequence[Outcome], command: str) -> dict[str, Any]:
    return {
        "command": command,
        "faults": sum(len(each.struck) for each in done),
        "seconds": round(sum(each.seconds for each in done), 1),
        "clean": all(each.is_sound for each in done),
        "recovery_s": {role: times.as_json() for role, times in summed(each.recovery_s for each in done).items()},
        "rounds": [
            {
                **each.plan.as_json(),
                "struck": each.struck,
                "steps": each.steps,
                "problems": each.problems,
                "endings": each.endings,
                "audit": each.audit,
            }
            for each in done
        ],
    }


def _arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=500)
    parser.add_argument("--few", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--round", type=int)
    parser.add_argument("--report", type=Path, help="also write the figures as JSON")
    parser.add_argument("--keep", type=Path, help="a new folder for the runs, kept in any case")
    return parser.parse_args(words)


if __name__ == "__main__":
    with boundary("chaos"):
        raise SystemExit(main())
