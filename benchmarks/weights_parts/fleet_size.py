"""Estimates the cost of a push to many workers from measurements of small fleets.

    push = fixed + per_worker * n + bytes * copies(n) / (bandwidth * senders)

`fixed` and `per_worker` are of the messages: four on the board for each worker, read by one learner. `copies` is how often the
busiest link carries a parcel. gloo sends whole buffers down a binomial tree, whose root has ceil(log2(n + 1)) children; NCCL
passes pieces along, so that every link carries everything once. Machines of their own are assumed, not workers that share one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Backend = Literal["gloo", "nccl"]

MODEL_GB = 16.0
"""Eight billion parameters in bfloat16."""
SENDERS = 8
LINKS: Mapping[Backend, float] = {"gloo": 3.1, "nccl": 50.0}
"""GB/s of each sender: what 25 and 400 Gbit/s carry."""
FLEETS = (1, 8, 64, 256, 1000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    fixed_s: float
    per_worker_s: float

    def push_s(self, workers: int, backend: Backend) -> float:
        copies = math.ceil(math.log2(workers + 1)) if backend == "gloo" else 1
        return self.fixed_s + self.per_worker_s * workers + MODEL_GB * copies / (LINKS[backend] * SENDERS)

    def figures(self) -> dict[str, float]:
        said = {f"model_{backend}_push_s_{size}": self.push_s(size, backend) for backend in LINKS for size in FLEETS}
        return {"messages_fixed_ms": 1e3 * self.fixed_s, "messages_per_worker_ms": 1e3 * self.per_worker_s, **said}

    def explained(self) -> str:
        lines = [
            f"messages take {1e3 * self.fixed_s:.2f} ms, and {1e3 * self.per_worker_s:.2f} ms for each worker;",
            f"{MODEL_GB:g} GB leave {SENDERS} ranks, each at {LINKS['gloo']:g} GB/s (gloo) or {LINKS['nccl']:g} GB/s (NCCL)",
            f"  {'workers':>8} {'gloo':>8} {'NCCL':>8}",
            *(f"  {size:8} {self.push_s(size, 'gloo'):6.2f} s {self.push_s(size, 'nccl'):6.2f} s" for size in FLEETS),
            "gloo connects every pair of a group: beyond some hundred workers that alone is more than systems allow",
        ]
        return "\n".join(lines)


def fitted(pushes: Mapping[int, float]) -> Cost:
    """`pushes`: seconds for next to no bytes, by the number of workers. A straight line, by least squares."""
    if len(pushes) == 1:
        ((size, seconds),) = pushes.items()
        return Cost(fixed_s=0.0, per_worker_s=seconds / size)
    mean_n, mean_s = (sum(values) / len(pushes) for values in (pushes.keys(), pushes.values()))
    slope = sum((n - mean_n) * (s - mean_s) for n, s in pushes.items()) / sum((n - mean_n) ** 2 for n in pushes)
    return Cost(fixed_s=mean_s - slope * mean_n, per_worker_s=slope)
