"""One real run for a long time with a fault every minute: its processes and its folder must not keep growing.

    make soak MINUTES=60 SEED=1

Exit code 1 where something grew beyond its bound, a fault was not overcome, or the audit at the end is not clean.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from async_rl.errors import boundary
from tests.chaos.pipeline.faults import strike
from tests.chaos.pipeline.plan import FAULTS_PER_ROUND, PIPELINES, Plan, rounds
from tests.chaos.pipeline.processes import descendants, role_of
from tests.chaos.pipeline.rounds import scene_of
from tests.chaos.pipeline.stage import Stage, Stalled
from tests.chaos.recovery import as_lines, summed

SAMPLE_S = 5.0
SETTLED_S = 60.0
"""Processes younger than this are ignored: they are still importing and allocating."""
WARM_UP = 0.2
"""Part of the time that is not judged."""

MEMORY_SHARE, MEMORY_MB = 0.10, 32.0
"""A role's processes may grow by this share, or by this many MiB, whichever is more."""
DESCRIPTORS, THREADS = 16, 4
FOLDER_MB_PER_1000_STEPS = 8.0
"""Journal, metrics, samples and logs; without the data of an embedded server, which redis.max_memory_mb bounds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A sample of the largest process of a role, or of the folder (as `memory_mb`)."""

    at_s: float
    steps: int
    memory_mb: float
    rss_mb: float = 0.0
    descriptors: int = 0
    threads: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    what: str
    before: float
    after: float
    bound: float

    @property
    def is_bounded(self) -> bool:
        return self.after - self.before <= self.bound

    @property
    def line(self) -> str:
        return (
            f"{self.what:<24} {self.before:10.1f} -> {self.after:10.1f}   may grow by {self.bound:8.1f}   "
            f"{'ok' if self.is_bounded else 'GROWS'}"
        )


class Sampler:
    def __init__(self, stage: Stage) -> None:
        self._stage, self._began = stage, time.monotonic()
        self._seen: dict[int, float] = {}
        self.samples: dict[str, list[Sample]] = {}

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began

    def look(self) -> None:
        now, steps = self.elapsed_s, self._stage.steps()
        alive = {pid: role_of(pid) for pid in (self._stage.pid, *descendants(self._stage.pid))}
        alive[self._stage.pid] = "supervisor"
        self._seen = {pid: self._seen.get(pid, now) for pid in alive}
        for role in sorted({role for role in alive.values() if role}):
            held = [
                found
                for pid, mine in alive.items()
                if mine == role and now - self._seen[pid] >= SETTLED_S
                if (found := _held(pid))
            ]
            if held:
                memory, rss, descriptors, threads = map(max, zip(*held, strict=True))
                self.samples.setdefault(role, []).append(
                    Sample(
                        at_s=now,
                        steps=steps,
                        memory_mb=memory,
                        rss_mb=rss,
                        descriptors=int(descriptors),
                        threads=int(threads),
                    )
                )
        folder = self._stage.config.run_folder
        size = sum(size for path, size in _files(folder) if "redis" not in path.relative_to(folder).parts)
        self.samples.setdefault("folder", []).append(Sample(at_s=now, steps=steps, memory_mb=size / 2**20))


def _files(folder: Path) -> list[tuple[Path, int]]:
    """Return the files below a folder with their sizes, without those that are deleted meanwhile."""
    found: list[tuple[Path, int]] = []
    for parent, _, names in os.walk(folder):  # unlike rglob, it passes over a folder that is deleted meanwhile
        for path in (Path(parent, name) for name in names):
            with suppress(FileNotFoundError):
                found.append((path, path.stat().st_size))
    return found


def _held(pid: int) -> tuple[float, float, float, float] | None:
    """Return PSS and RSS in MiB, descriptors and threads; None for a process that has ended."""
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        sizes = {line.split(":")[0]: int(line.split()[1]) for line in rollup[1:]}
        return (
            sizes["Pss"] / 1024,
            sizes["Rss"] / 1024,
            len(list(Path(f"/proc/{pid}/fd").iterdir())),
            len(list(Path(f"/proc/{pid}/task").iterdir())),
        )
    except (OSError, LookupError):
        return None


def growths(samples: dict[str, list[Sample]]) -> list[Growth]:
    """Return the samples of the first and of the last third of the judged time."""
    found: list[Growth] = []
    for role, each in samples.items():
        judged = [sample for sample in each if sample.at_s >= WARM_UP * each[-1].at_s]
        third = max(1, len(judged) // 3)
        first, last = judged[:third], judged[-third:]
        before, after = _middle(first, "memory_mb"), _middle(last, "memory_mb")
        if role == "folder":
            steps = _middle(last, "steps") - _middle(first, "steps")
            bound = FOLDER_MB_PER_1000_STEPS * max(steps, 100) / 1000
            found.append(Growth(what="folder MiB", before=before, after=after, bound=bound))
            continue
        bound = max(MEMORY_SHARE * before, MEMORY_MB)
        found.append(Growth(what=f"{role} PSS MiB", before=before, after=after, bound=bound))
        for name, most in (("descriptors", DESCRIPTORS), ("threads", THREADS)):
            found.append(Growth(what=f"{role} {name}", before=_middle(first, name), after=_middle(last, name), bound=most))
    return found


def _middle(samples: Sequence[Sample], name: str) -> float:
    return float(median(getattr(sample, name) for sample in samples))


def main() -> int:
    wanted = _arguments()
    root = Path(tempfile.mkdtemp(prefix="soak-"))
    faults = max(1, round(wanted.minutes * 60 / wanted.every))
    pipeline = PIPELINES[wanted.pipeline]
    planned = [plan for plan in rounds(wanted.seed, FAULTS_PER_ROUND * len(PIPELINES) * faults) if plan.pipeline == pipeline]
    kinds = [kind for plan in planned for kind in plan.faults][:faults]
    plan = Plan(seed=wanted.seed, round=0, pipeline=pipeline, faults=kinds)
    problems: list[str] = []
    recovery: dict[str, list[float]] = {}
    with scene_of(plan, root) as scene:
        stage = scene.stage
        sampler = Sampler(stage)
        try:
            stage.until_trained(2, "the run trains its first steps")
            for number, kind in enumerate(kinds, start=1):
                _watch(sampler, until_s=min(number * wanted.every, wanted.minutes * 60))
                since, lives = time.monotonic(), stage.lives()
                struck = strike(kind, scene)
                stage.until_overcome(struck, lives, kind)
                recovery.setdefault(struck.role, []).append(time.monotonic() - since)
                print(f"{sampler.elapsed_s:6.0f} s  {kind:<20} step {stage.steps()}", file=sys.stderr, flush=True)
            _watch(sampler, until_s=sampler.elapsed_s + SAMPLE_S)
        except Stalled as stalled:
            problems.append(str(stalled))
        if (code := stage.drain()) != 0:
            problems.append(f"told to drain, the run ended with exit code {code}")
        audit, steps, endings = stage.audit(), stage.steps(), stage.endings
    grown = growths(sampler.samples)
    problems += [f"{each.what} grew from {each.before:.1f} to {each.after:.1f}" for each in grown if not each.is_bounded]
    problems += [*audit.get("findings", []), *audit.get("unchecked", [])]
    lines = [each.line for each in grown] + as_lines(summed([recovery]))
    lines += [f"the run ended by itself: {each}" for each in endings] + [f"PROBLEM: {each}" for each in problems]
    lines.append(f"{len(kinds)} faults in {sampler.elapsed_s / 60:.0f} minutes, {steps} steps ({pipeline.name})")
    print("\n".join(["", *lines]))
    if wanted.report is not None:
        wanted.report.parent.mkdir(parents=True, exist_ok=True)
        wanted.report.write_text(json.dumps(_as_json(wanted, sampler, grown, recovery, problems, steps), indent=1))
    if problems:
        print(f"the run's folder: {root}")
        return 1
    shutil.rmtree(root)
    return 0


def _watch(sampler: Sampler, *, until_s: float) -> None:
    while True:
        sampler.look()
        if (left := until_s - sampler.elapsed_s) <= 0:
            return
        time.sleep(min(SAMPLE_S, left))  # samples are taken at intervals


def _as_json(
    wanted: argparse.Namespace,
    sampler: Sampler,
    grown: Sequence[Growth],
    recovery: dict[str, list[float]],
    problems: Sequence[str],
    steps: int,
) -> dict[str, Any]:
    return {
        "minutes": wanted.minutes,
        "seed": wanted.seed,
        "steps": steps,
        "problems": list(problems),
        "growth": [
            {"what": each.what, "before": each.before, "after": each.after, "bound": each.bound, "ok": each.is_bounded}
            for each in grown
        ],
        "recovery_s": {role: times.as_json() for role, times in summed([recovery]).items()},
        "samples": {
            role: [
                [round(each.at_s), each.steps, round(each.memory_mb, 1), round(each.rss_mb, 1), each.descriptors, each.threads]
                for each in found
            ]
            for role, found in sampler.samples.items()
        },
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--every", type=float, default=60, help="seconds from fault to fault")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pipeline", type=int, default=0, choices=range(len(PIPELINES)), help="which kind of run, in plan.py")
    parser.add_argument("--report", type=Path, help="also write every sample as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    with boundary("soak"):
        raise SystemExit(main())
