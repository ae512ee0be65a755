"""Measure which operators a decode step spends its CPU time in, ours beside Hugging Face's `generate`."""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.profiler import ProfilerActivity, profile

from rollout_workers.inference.engine_core import EngineCore
from rollout_workers.inference.generation import Generation, Sampling

KINDS = {
    "attention": ("scaled_dot_product", "flash_attention"),
    "matrix products": ("aten::mm", "aten::addmm", "aten::bmm", "aten::linear"),
    "keys and values": ("index_select", "aten::cat", "index_put", "index_copy"),
    "norms and activations": ("norm", "silu", "aten::pow", "aten::mean", "rsqrt"),
}
"""What the names of its operators contain, by kind."""
_IDS = itertools.count()
OTHER, OUTSIDE = "other operators", "outside operators"


def operator_times(run: Callable[[], object], steps: int) -> dict[str, float]:
    """Return milliseconds of CPU time a step by kind. `run` makes `steps` steps on this thread.

    The first run only warms up, the second is timed, the third is profiled. Outside operators are Python and torch's dispatch:
    what the second took more than the operators of the third.
    """
    run()
    began = time.thread_time()
    run()
    whole_s = time.thread_time() - began
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        run()
    found = by_kind(profiled.key_averages())
    found[OUTSIDE] = max(0.0, whole_s - sum(found.values()))
    return {kind: 1e3 * seconds / steps for kind, seconds in found.items()}


def by_kind(events: Any) -> dict[str, float]:
    """Return the seconds that operators spent themselves, by kind."""
    found: defaultdict[str, float] = defaultdict(float, dict.fromkeys([*KINDS, OTHER], 0.0))
    for event in events:
        kind = next((kind for kind, words in KINDS.items() if any(word in event.key for word in words)), OTHER)
        found[kind] += event.self_cpu_time_total / 1e6
    return dict(found)


def decode(core: EngineCore, prompts: Sequence[Sequence[int]], answer_tokens: int) -> None:
    """Generate an answer to every prompt on this thread."""
    ended: list[object] = []
    sampling = Sampling(max_tokens=answer_tokens, temperature=1.0, top_p=1.0, top_k=0, stop=(), stop_token_ids=(), seed=None)
    for prompt in prompts:
        core.submit(Generation(id=next(_IDS), prompt=list(prompt), sampling=sampling, finish=ended.append))
    while len(ended) < len(prompts):
        core.step()


def print_times(ours: Mapping[str, float], theirs: Mapping[str, float]) -> None:
    print(f"{'ms of CPU a step':<24} {'engine':>8} {'generate':>9}")
    for kind in [*KINDS, OTHER, OUTSIDE]:
        print(f"{kind:<24} {ours[kind]:8.2f} {theirs[kind]:9.2f}")
    print(f"{'all':<24} {sum(ours.values()):8.2f} {sum(theirs.values()):9.2f}")
