"""Random lengths, and quality measures of a packing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from learner.packing.best_fit import fewest_bins
from learner.packing.cost import TYPICAL
from learner.packing.planner import Bins

CAPACITY = 32768
Lengths = npt.NDArray[np.int64]


def drawn(kind: str, count: int, seed: int) -> Lengths:
    rng = np.random.default_rng(seed)
    if kind == "lognormal":
        found = rng.lognormal(np.log(4000), 1, count)
    elif kind == "uniform":
        found = rng.integers(64, CAPACITY + 1, count)
    else:
        found = np.where(rng.random(count) < 0.75, rng.normal(700, 100, count), rng.normal(24_000, 3000, count))
    return np.clip(found, 1, CAPACITY).astype(np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Worth:
    bins: int
    """Non-empty bins of all shards."""
    above_bound: int
    """Bins above Martello and Toth's lower bound."""
    over_capacity: int
    """Bins with more tokens than the capacity."""
    fill: float
    """Share of the bins' capacity that holds tokens."""
    cost: float
    """Cost of the costliest shard over the mean."""
    lock_step: float
    """Time if shards wait for each other after every bin, over the time without waiting."""


def dealt(bins: Bins, num_shards: int) -> list[Bins]:
    """Deal bins to the shards in turn, for packers without shards."""
    missing = -len(bins) % num_shards
    padded = [*bins, *[[] for _ in range(missing)]]
    return [padded[shard::num_shards] for shard in range(num_shards)]


def worth(shards: Sequence[Bins], lengths: Lengths) -> Worth:
    assert sorted(index for bins in shards for members in bins for index in members) == list(range(len(lengths)))
    each = TYPICAL.of(lengths)
    tokens = np.array([[lengths[members].sum() for members in bins] for bins in shards])
    costs = np.array([[each[members].sum() for members in bins] for bins in shards])
    used = int((tokens > 0).sum())
    return Worth(
        bins=used,
        above_bound=used - fewest_bins(np.sort(lengths)[::-1], CAPACITY),
        over_capacity=int((tokens > CAPACITY).sum()),
        fill=float(tokens.sum() / (used * CAPACITY)),
        cost=float(costs.sum(axis=1).max() / costs.sum(axis=1).mean()),
        lock_step=float(costs.max(axis=0).sum() / costs.mean(axis=0).sum()),
    )
