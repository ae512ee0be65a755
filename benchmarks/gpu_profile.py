"""Print which kernels the time of a decode step and of a training step goes to, on a GPU.

usage: python benchmarks/gpu_profile.py [--json PATH] [--rows N] [decode:BATCH:CONTEXT | train:ROW:SEQUENCES:RECOMPUTE] ...

Qwen3-0.6B's dimensions, random weights; training has two rows. `idle` is the share of a step in which the device computes
nothing.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from gpu_bench_parts.training import learner_of
from gpu_checks.decoding import Decoder
from gpu_checks.learner_checks import REINFORCE
from gpu_checks.report import QWEN3_600M, Machine
from learner_parts.rollouts import groups_of
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from learner.batches.batch import pack_batch

DEFAULT = ("decode:64:512", "decode:64:4096", "train:32768:8:none")
STEPS = 4
GPU = torch.device("cuda", 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    name: str
    per_step: float
    ms: float
    """Time on the device per step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    work: str
    step_ms: float
    """Wall-clock time of a step that is not profiled."""
    busy_ms: float
    kernels: list[Kernel]

    def lines(self, rows: int) -> Iterable[str]:
        idle = 1 - self.busy_ms / self.step_ms
        yield f"{self.work}: {self.step_ms:.3f} ms a step, kernels {self.busy_ms:.3f} ms, idle {idle:.0%}"
        for each in self.kernels[:rows]:
            yield f"  {each.ms:9.3f} ms {each.per_step:7.1f} x  {each.name}"


def profiled(work: str, step: Callable[[], object]) -> Profile:
    """Time some steps, then profile as many."""
    for _ in range(2):
        step()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(STEPS):
        step()
    torch.cuda.synchronize()
    step_s = (time.perf_counter() - started) / STEPS
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
    found: dict[str, list[float]] = defaultdict(list)
    for event in seen.events() or ():
        if event.device_type == DeviceType.CUDA:
            found[_short(event.name)].append(event.time_range.elapsed_us())
    kernels = [Kernel(name=name, per_step=len(us) / STEPS, ms=sum(us) / STEPS / 1e3) for name, us in found.items()]
    kernels.sort(key=lambda kernel: -kernel.ms)
    return Profile(work=work, step_ms=1e3 * step_s, busy_ms=sum(kernel.ms for kernel in kernels), kernels=kernels)


def _short(name: str) -> str:
    """The beginning of a kernel's name, without what all of torch's share."""
    return re.sub(r"\s+", " ", name.replace("at::native::", "").replace("void ", ""))[:150]


def decode(work: str, batch: int, context: int) -> Profile:
    decoder = Decoder(Machine(device=GPU), replace(QWEN3_600M, max_positions=8192), room_for=[(batch, context + 256)])
    running = decoder.start(batch, context, tokens=200)
    decoder.step_until(lambda: all(each.token_ids for each in running))
    found = profiled(work, decoder.core.step)
    decoder.finish(running)
    decoder.core.close()
    return found


def train(work: str, row: int, sequences: int, recompute: str) -> Profile:
    shape = replace(QWEN3_600M, max_positions=row)
    learner = learner_of(shape, row, recompute)
    groups = groups_of([row // sequences] * (2 * sequences), group_size=4, vocab_size=shape.vocab_size, seed=3)
    packed = pack_batch(groups, objective=REINFORCE, capacity=row)
    found = profiled(work, lambda: learner.step(packed))
    learner.stop()
    return found


def run(work: str) -> Profile:
    kind, *sizes = work.split(":")
    return decode(work, *map(int, sizes)) if kind == "decode" else train(work, int(sizes[0]), int(sizes[1]), sizes[2])


def work_of(text: str) -> str:
    """Check an argument: argparse shows the usage if this raises."""
    if not re.fullmatch(r"decode:\d+:\d+|train:\d+:\d+:(none|selective|full)", text):
        raise argparse.ArgumentTypeError(f"{text!r} is neither decode:BATCH:CONTEXT nor train:ROW:SEQUENCES:RECOMPUTE")
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", nargs="*", default=DEFAULT, type=work_of)
    parser.add_argument("--rows", type=int, default=25, help="kernels to print (25)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("torch sees no GPU, whose kernels this profiles: benchmarks/engine.py --operators is for a CPU")
    found: list[Profile] = []
    for work in args.work:
        found.append(run(work))
        print("\n".join(found[-1].lines(args.rows)), flush=True)
        if args.json is not None:
            args.json.write_text(json.dumps([asdict(each) for each in found], indent=2) + "\n")


if __name__ == "__main__":
    main()
