"""The goals of benchmarks/gpu_bench.py, and the sizes that have them. Imports no torch: the page is written without it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

FEW = ((1, 512), (8, 512), (64, 512), (256, 512), (32, 4096))
"""At most 200,000 tokens in the cache, so that 8 B parameters fit 80 GB beside the weights of a swap."""
DECODED: Mapping[str, Sequence[tuple[int, int]]] = {
    "0.6B": ((1, 512), (8, 512), (64, 512), (256, 512), (512, 512), (1, 4096), (8, 4096), (64, 4096)),
    "1.7B": FEW,
    "4B": FEW,
    "8B": FEW,
}
"""Requests that decode, and the tokens of their prompts, by the size of the model. Each of them has the goal of decoding."""
TRAINED = (
    ("0.6B", "none"),
    ("0.6B", "selective"),
    ("1.7B", "selective"),
    ("1.7B", "none"),
    ("4B", "selective"),
    ("4B", "full"),
)
"""Models and what is computed again; without that, 4 B parameters do not fit an H200 with rows of 32,768 tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    what: str
    figure: str
    """CHECK.FIGURE in the JSON."""
    wanted: float
    is_at_most: bool = False

    def shortfall(self, found: float) -> float:
        """Return how many times too small, or too large, the figure is; at most 1: the goal is met."""
        return found / self.wanted if self.is_at_most else self.wanted / max(found, 1e-12)


def share_of_copy(batch: int, context: int) -> str:
    """The name of a figure of decoding."""
    return f"batch_{batch}_context_{context}_of_copy_bandwidth"


def _of_decoding() -> Iterator[Goal]:
    for size, pairs in DECODED.items():
        for batch, context in pairs:
            yield Goal(
                what=f"decoding {size}, {batch} at {context} tokens, share of the copy's bandwidth",
                figure=f"decode_{size}.{share_of_copy(batch, context)}",
                wanted=0.75,
            )


def _of_training() -> Iterator[Goal]:
    for size, recompute in TRAINED:
        yield Goal(
            what=f"training {size}, rows of 32k, recompute {recompute}, MFU",
            figure=f"train_{size}_{recompute}.mfu",
            wanted=0.45,
        )


GOALS = (
    *_of_decoding(),
    *_of_training(),
    Goal(what="tokens/s of uneven lengths over equal ones", figure="lengths.uneven_over_equal", wanted=0.97),
    Goal(what="swap of 8 B weights on the device, TB/s", figure="swap_8B.swap_tb_s", wanted=1.5),
    Goal(what="swap of 0.6 B weights on the device, TB/s", figure="swap_0.6B.swap_tb_s", wanted=1.5),
    Goal(
        what="decoding waits for a swap of 8 B weights, ms at most", figure="swap_8B.worst_swap_ms", wanted=20, is_at_most=True
    ),
    Goal(what="deltas of a parcel on the device, share of the copy's bandwidth", figure="delta.of_copy_bandwidth", wanted=0.7),
    Goal(what="deltas at learning rate 1e-6, times smaller than the weights", figure="delta.times_smaller", wanted=100),
    Goal(
        what="synchronous over asynchronous runs, time of a step on one device",
        figure="overlap.synchronous_over_asynchronous",
        wanted=1.25,
    ),
    Goal(what="host path: share of training without a kernel", figure="host_path.gpu_idle", wanted=0.02, is_at_most=True),
    Goal(what="host path: reading and packing hidden behind training", figure="host_path.hidden", wanted=0.95),
    Goal(
        what="log-probabilities of engine and learner, mean difference in nats", figure="gap.mean", wanted=1e-3, is_at_most=True
    ),
)
