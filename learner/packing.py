"""Which sequence goes into which bin of which data-parallel shard. Pure, deterministic, lengths in and indices out.

Best-fit decreasing keeps the number of bins within a few of the optimum. Where the shards want a few more bins than
that, the slack is used to even the bins out: a step is as slow as its fullest shard.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from async_rl.errors import ConfigError
from learner.best_fit import best_fit, descending

Bins = list[list[int]]


def plan(lengths: Sequence[int] | npt.NDArray[np.integer], capacity: int, num_shards: int = 1) -> list[Bins]:
    """shard -> bin -> indices of sequences. No bin exceeds `capacity`; every shard has as many bins (some may be empty)."""
    sizes = np.asarray(lengths, dtype=np.int64)
    if sizes.size and sizes.max() > capacity:
        longest = int(sizes.argmax())
        raise ConfigError(
            f"sequence {longest} has {sizes[longest]} tokens, more than batch.bin_tokens ({capacity}): "
            "raise batch.bin_tokens, or lower sampling.max_tokens"
        )
    bins = best_fit(sizes, capacity)
    if num_shards == 1:
        return [bins]
    longest_first: list[int] = descending(sizes, capacity).tolist()
    length_of: list[int] = sizes.tolist()
    num_bins = -(-len(bins) // num_shards) * num_shards
    bins = _even(longest_first, length_of, capacity, num_bins) or bins + [[] for _ in range(num_bins - len(bins))]
    return _deal(bins, length_of, num_shards)


def _even(longest_first: list[int], length_of: list[int], capacity: int, num_bins: int) -> Bins | None:
    """Each sequence goes to the emptiest of exactly `num_bins` bins; None where that overflows one."""
    bins: Bins = [[] for _ in range(num_bins)]
    emptiest = [(0, bin_) for bin_ in range(num_bins)]
    for index in longest_first:
        load, bin_ = emptiest[0]
        if load + length_of[index] > capacity:
            return None
        bins[bin_].append(index)
        heapq.heapreplace(emptiest, (load + length_of[index], bin_))
    return bins


def _deal(bins: Bins, length_of: list[int], num_shards: int) -> list[Bins]:
    """Fullest bin first, each to the lightest shard that still has room for a bin.

    So the i-th bins of all shards are alike too, which matters where the ranks wait for each other at every one.
    """
    load_of = [sum(length_of[index] for index in members) for members in bins]
    shards: list[Bins] = [[] for _ in range(num_shards)]
    lightest = [(0, shard) for shard in range(num_shards)]
    for bin_ in sorted(range(len(bins)), key=lambda bin_: -load_of[bin_]):
        load, shard = heapq.heappop(lightest)
        shards[shard].append(bins[bin_])
        if len(shards[shard]) < len(bins) // num_shards:
            heapq.heappush(lightest, (load + load_of[bin_], shard))
    return shards
