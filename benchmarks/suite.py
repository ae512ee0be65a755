"""Run the benchmarks one after another and print one table: ours, rivals, and what the machine could do at most.

    make bench                                    # all of them, more than an hour on an idle machine
    make bench WITH="engine start"                # some of them
    python benchmarks/suite.py --show runs/bench/2026-11-23T10-00-00.json

A benchmark that fails costs its own rows. The figures are kept in runs/bench/ with date, versions and facts about the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
RESULTS = REPOSITORY / "runs" / "bench"
LIBRARIES = ("torch", "megatron-core", "transformers", "redis", "numpy")

Figures = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Side:
    """Something that ours is compared with: its name, its figure ("" if it has none) and the figure that is the ratio."""

    name: str
    figure: str
    ratio: str = ""
    """Empty: ours divided by its figure."""


@dataclass(frozen=True, slots=True)
class Row:
    what: str
    ours: str
    rival: Side | None = None
    limit: Side | None = None


@dataclass(frozen=True, slots=True)
class Benchmark:
    words: Sequence[str]
    """The script and its arguments."""
    rows: Sequence[Row]


def _round_trip(size: str, tokens: str) -> Row:
    return Row(
        f"buffer: rollouts of {tokens} tokens, 1/s",
        f"round_trip_{size}_per_s",
        Side("Reverb", f"reverb_{size}_per_s", f"round_trip_{size}_vs_reverb"),
        Side("raw Redis", f"redis_limit_{size}_per_s", f"round_trip_{size}_vs_redis_limit"),
    )


SUITE = {
    "end_to_end": Benchmark(
        ("end_to_end.py", "--seeds", "5"),
        [
            Row("even digits to reward 0.9, s", "wall_s", Side("TRL", "trl_wall_s", "wall_vs_trl")),
            Row("the same, completions", "samples", Side("TRL", "trl_samples", "samples_vs_trl")),
        ],
    ),
    "start": Benchmark(
        ("start.py", "--rounds", "3"),
        [
            Row("command to first step, s", "first_step_s", limit=Side("import and build", "yardstick_s")),
            Row("killed learner to next step, s", "step_after_kill_s", limit=Side("import and build", "yardstick_s")),
        ],
    ),
    "pace": Benchmark(
        ("pace.py", "--seeds", "3", "--paces", "full", "auto"),
        [
            Row("quickstart at pace auto, s a step", "pace_auto_step_s", limit=Side("pace full", "pace_full_step_s")),
            Row("the same, mean age", "pace_auto_age", limit=Side("pace full", "pace_full_age")),
        ],
    ),
    "learner_step": Benchmark(
        ("learner_step.py", "--rounds", "9"),
        [
            Row("learner on packed rows, tokens/s", "tokens_per_s", Side("padded rows", "", "packed_vs_padded")),
            Row("step of a run, s", "run_step_s", limit=Side("slower of both alone", "", "run_vs_slower")),
        ],
    ),
    "engine": Benchmark(
        ("engine.py", "--rounds", "9"),
        [
            Row(
                "engine, batch of 64, tokens/s",
                "tokens_per_s",
                Side("HF generate", "hf_tokens_per_s", "tokens_per_s_vs_hf_generate"),
            )
        ],
    ),
    "engine_host": Benchmark(
        ("engine.py", "--host"),
        [
            Row(f"host's part of a decode step, batch of {batch}, ms", f"decode_ms_{batch}", limit=Side("nn.Linear", linear))
            for batch, linear in ((64, "linear_ms_64"), (256, "linear_ms_256"))
        ],
    ),
    "buffer_speed": Benchmark(
        ("buffer_speed.py", "--rounds", "5", "--parts", "codec,transport"),
        [_round_trip("2k", "2,048"), _round_trip("16k", "16,384")],
    ),
    "weights": Benchmark(
        ("weights.py", "--rounds", "9"),
        [
            Row("push over gloo, GB/s", "gloo_push_gb_s", Side("flat broadcast", "flat_gloo_gb_s", "push_vs_flat_gloo")),
            Row("push read in place, GB/s", "memory_push_gb_s", limit=Side("memcpy", "memcpy_gb_s", "same_host_vs_memcpy")),
            Row("push of small tensors, GB/s", "small_push_gb_s", Side("one by one", "naive_gb_s", "small_tensors_vs_naive")),
        ],
    ),
    "packing": Benchmark(
        ("packing.py", "--rounds", "5", "--counts", "256", "4096"),
        [
            Row(
                "pack and materialise, Mtok/s",
                "ours_materialise_mtok_s",
                Side("TRL", "trl_materialise_mtok_s"),
                Side("memcpy", "copy_materialise_mtok_s"),
            )
        ],
    ),
}


def table(figures: Mapping[str, Figures]) -> list[str]:
    """One line for each row whose benchmark has run."""
    rows = [(row, figures[name]) for name, benchmark in SUITE.items() if name in figures for row in benchmark.rows]
    lines = [f"{'':<46} {'ours':>9}  {'beside a rival':<34} beside a limit"]
    for row, found in rows:
        lines.append(
            f"{row.what:<46} {_number(found.get(row.ours)):>9}  {_beside(row, row.rival, found):<34} "
            f"{_beside(row, row.limit, found)}".rstrip()
        )
    return lines


def _beside(row: Row, side: Side | None, found: Figures) -> str:
    if side is None:
        return ""
    ours, theirs = found.get(row.ours), found.get(side.figure)
    ratio = found.get(side.ratio) if side.ratio else ours / theirs if ours is not None and theirs else None
    return f"{_number(ratio)} x {side.name}" + (f" ({_number(theirs)})" if theirs is not None else "")


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def facts() -> dict[str, Any]:
    """When, with what and where."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": commit.stdout.strip(),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in LIBRARIES}},
        "machine": {
            "system": platform.platform(),
            "processor": _processor(),
            "cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
            "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
            "load_before": os.getloadavg()[0],
        },
    }


def _version(library: str) -> str | None:
    try:
        return version(library)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    cpus = Path("/proc/cpuinfo")
    lines = cpus.read_text().splitlines() if cpus.exists() else []
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.processor())


def run(names: Sequence[str], kept: Path) -> int:
    """Run them, keep what they found after each, and print the table; returns how many failed."""
    result, figures = facts(), dict[str, Figures]()
    kept.parent.mkdir(parents=True, exist_ok=True)
    failed = 0
    for name in names:
        script, *words = SUITE[name].words
        print(f"== {name}: {script} {' '.join(words)}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            found = Path(folder) / "figures.json"
            command = [sys.executable, REPOSITORY / "benchmarks" / script, *words, "--json", found]
            if subprocess.run(command, check=False).returncode == 0:
                figures[name] = json.loads(found.read_text())
            else:
                failed += 1
                print(f"{name} failed; its rows are left out", file=sys.stderr, flush=True)
        kept.write_text(json.dumps({**result, "figures": figures}, indent=1) + "\n")
    print("", *table(figures), "", f"kept in {kept}", sep="\n")
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(SUITE)} (default: all)")
    parser.add_argument("--show", type=Path, help="print the table of kept figures and run nothing")
    args = parser.parse_args()
    if args.show is not None:
        print(*table(json.loads(args.show.read_text())["figures"]), sep="\n")
        return 0
    if unknown := set(args.names) - set(SUITE):
        parser.error(f"there is no benchmark {', '.join(sorted(unknown))}; there are {', '.join(SUITE)}")
    return run(args.names or list(SUITE), RESULTS / f"{time.strftime('%Y-%m-%dT%H-%M-%S')}.json")


if __name__ == "__main__":
    sys.exit(main())
