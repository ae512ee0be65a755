"""Measure what the recording of events and rollouts costs: the quickstart with and without it, in turn.

The cost is in CPU time of all processes per step, which a busy machine hardly changes, unlike wall time. What processes
need to start is measured by a run of one step and left out. `ratio` compares the medians: 1.01 is 1 % more. On a
machine that others use, it differs by more from run to run; so the recording's own work is also done again by itself
(`replayed`): the groups of a run are measured as on the worker, encoded with and without their times, and recorded as
on the learner. `span_us` is what making and encoding a span takes, if spans are sent (recording.otlp_endpoint).

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
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np

from async_rl.payloads.codec import encode
from async_rl.recording import Recording
from async_rl.recording.recorder import Recorder
from async_rl.recording.spans.making import SpanMaker
from async_rl.recording.spans.sender import AT_ONCE, SpanSender
from async_rl.types import Completion, StopReason, spans_of
from rollout_workers.episodes.group_timeline import GroupTimeline, as_sibling, current_clock

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


def replayed_cpu(run_folder: Path, steps: int) -> float:
    """Do the recording's work for the groups of a run again, and return its CPU seconds per step."""
    recording = Recording(run_folder)
    groups = [found for row in recording.groups() if (found := recording.group(row.id)) is not None]
    events = list(recording.events())
    payloads = [encode(group.content) for group in groups]
    with tempfile.TemporaryDirectory() as folder:
        began = time.process_time()
        with Recorder(Path(folder), "learner", events_bytes=32 * 10**6, rollouts_bytes=256 * 10**6) as recorder:
            for event in events:
                if event.kind != "group":  # those come with their groups
                    recorder.add(event)
            for group, payload in zip(groups, payloads, strict=True):
                recorder.group(group.facts, group.content, payload)
        recorded_s = time.process_time() - began
    began = time.process_time()
    for group in groups:
        measure_group(len(group.content.rollouts))
        encode(group.content)
    with_times_s = time.process_time() - began
    without = [replace(group.content, times=None) for group in groups]
    began = time.process_time()
    for content in without:
        encode(content)
    return (recorded_s + max(0.0, with_times_s - (time.process_time() - began))) / steps


def span_cpu(run_folder: Path) -> float:
    """Make and encode the spans of a run's groups, and return the CPU seconds of one."""
    from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans

    recording = Recording(run_folder)
    groups = [found for row in recording.groups() if (found := recording.group(row.id)) is not None]
    maker, sender = SpanMaker("benchmark"), SpanSender("http://127.0.0.1:4318", run="benchmark", key="the benchmark")
    began = time.process_time()
    spans = [span for group in groups for span in maker.of_group(group)]
    for first in range(0, len(spans), AT_ONCE):
        encode_spans([sender.readable(span) for span in spans[first : first + AT_ONCE]]).SerializeToString()
    return (time.process_time() - began) / len(spans)


def measure_group(episodes: int) -> None:
    """Measure stages as a worker does: of each episode a wait, a generation and its grading."""
    nothing = np.zeros(1, np.int32), np.zeros(1, np.float32)
    done = Completion(
        token_ids=nothing[0], logprobs=nothing[1], versions=spans_of([1]), stop_reason=StopReason.END, text="", queued_s=0.001
    )
    with GroupTimeline().measured():
        for number in range(episodes):
            with as_sibling(number):
                clock = current_clock()
                assert clock is not None
                since = clock.timeline.now()
                clock.add_generation(done, since)
                clock.add("reward", since)


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
        replayed_s = min(replayed_cpu(folder / "recorded-0", args.steps) for _ in range(3))
        span_s = min(span_cpu(folder / "recorded-0") for _ in range(3))
        size = sum(file.stat().st_size for file in (folder / "recorded-0").glob("*/learner-*"))
    ratio = median(pair.recorded for pair in pairs) / median(pair.without for pair in pairs)
    print(f"recorded {size / 1e6:.2f} MB in {args.steps} steps")
    print(f"ratio {ratio:.4f} (medians of {len(pairs)} pairs; CPU time per step of all processes, without their start)")
    share = replayed_s / median(pair.without for pair in pairs)
    print(f"replayed {replayed_s * 1000:.2f} ms of CPU time per step, {share:.2%} of a step without recording")
    print(f"a span takes {span_s * 1e6:.0f} us of CPU time")
    if args.json is not None:
        found = {
            "ratio": ratio,
            "replayed_share": share,
            "span_us": span_s * 1e6,
            "pairs": [asdict(pair) for pair in pairs],
            "recorded_bytes": size,
            "steps": args.steps,
        }
        args.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
