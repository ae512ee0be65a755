"""Assign sequences to the bins (packed rows) of data-parallel shards. Pure and deterministic: lengths in, indices out.

The number of bins is within a few of the optimum. The remaining freedom balances ranks that run side by side: bins are
grouped into rows of similar cost, one bin per shard, and the shard with the highest total gets the cheapest bin of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from learner.packing.best_fit import Int64s, best_fit, descending_order, fewest_bins
from learner.packing.cost import TYPICAL, Cost
from learner.packing.lock_step import balanced_bins, balanced_rows, ranked_by_cost

Bins = list[list[int]]

MAX_BALANCED_SEQUENCES = 8192
"""Up to this number of sequences bins are balanced jointly; with more, the bins of a row are similar anyway."""
MAX_BALANCED_FILL = 0.985
"""If bins must be filled above this share, balancing them would exceed the capacity."""
COST_SCALE = 2**40
"""Scale of costs as integers, which are exact and fast to compare."""


def plan(
    lengths: Sequence[int] | npt.NDArray[np.integer],
    capacity: int,
    num_shards: int = 1,
    *,
    multiple: int = 1,
    bins_multiple: int = 1,
    cost: Cost = TYPICAL,
) -> list[Bins]:
    """Return shard -> bin -> indices of sequences.

    No bin exceeds `capacity` tokens, except that a longer sequence has a bin of its own. All shards have the same number of
    bins, a multiple of `bins_multiple`; some may be empty. A sequence's tokens are rounded up to a multiple of `multiple`.
    """
    slots = -(-np.asarray(lengths, dtype=np.int64) // multiple) * multiple
    if not slots.size:
        return [[] for _ in range(num_shards)]
    rooms = np.minimum(slots, capacity)  # a longer sequence fills its bin
    order = descending_order(rooms, capacity)
    places, num_rows = _rows(rooms[order], cost.of(slots[order]), capacity, num_shards, bins_multiple)
    of_sequence = np.empty_like(places)
    of_sequence[order] = places
    bins = _as_lists(of_sequence, num_rows * num_shards)
    return [bins[shard * num_rows : (shard + 1) * num_rows] for shard in range(num_shards)]


def _rows(
    sizes: Int64s, exact_costs: npt.NDArray[np.float64], capacity: int, width: int, bins_multiple: int
) -> tuple[Int64s, int]:
    """For descending sizes return each sequence's place (shard x rows + row) and the number of rows."""
    costs = np.rint(exact_costs * (COST_SCALE / exact_costs.sum())).astype(np.int64)
    places, num_rows = None, 0
    if width > 1 and len(sizes) <= MAX_BALANCED_SEQUENCES:
        num_rows = _rounded_up(fewest_bins(sizes, capacity), width * bins_multiple) // width
        if sizes.sum() <= MAX_BALANCED_FILL * capacity * num_rows * width:
            places = balanced_rows(sizes, costs, capacity, num_rows=num_rows, width=width)
    if places is None:
        places, num_bins = _densely_packed(sizes, costs, capacity, width * bins_multiple)
        num_rows = num_bins // width
    return (_dealt_to_shards(places, costs, num_rows, width) if width > 1 else places), num_rows


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _densely_packed(sizes: Int64s, costs: Int64s, capacity: int, multiple: int) -> tuple[Int64s, int]:
    """Use as few bins as best-fit finds, by falling cost; the content of the last ones is spread over the required number."""
    bins = best_fit(sizes, capacity)
    num_bins = int(bins.max()) + 1
    wanted = _rounded_up(num_bins, multiple)
    places, _ = ranked_by_cost(bins, costs, num_bins)
    last = np.flatnonzero(places >= wanted - multiple)
    if wanted > num_bins and (spread := balanced_bins(sizes[last], costs[last], capacity, multiple)) is not None:
        places[last] = wanted - multiple + ranked_by_cost(spread, costs[last], multiple)[0]
    return places, wanted


def _dealt_to_shards(places: Int64s, costs: Int64s, num_rows: int, width: int) -> Int64s:
    """Translate row x width + column to shard x rows + row: the costliest bin of each row goes to the lightest shard.

    Rows with the largest differences are dealt first, so that the others can compensate.
    """
    loads = np.bincount(places, weights=costs, minlength=num_rows * width).reshape(num_rows, width)
    columns = np.argsort(-loads, axis=1, kind="stable")
    falling = np.take_along_axis(loads, columns, axis=1)
    shards = np.empty_like(columns)
    totals = [0.0] * width
    for row in np.argsort(falling[:, -1] - falling[:, 0], kind="stable").tolist():
        lightest_first = sorted(range(width), key=totals.__getitem__)
        for shard, load in zip(lightest_first, falling[row].tolist(), strict=True):
            totals[shard] += load
        shards[row] = lightest_first
    shard_of = np.empty_like(columns)
    np.put_along_axis(shard_of, columns, shards, axis=1)
    return shard_of.ravel()[places] * num_rows + places // width


def _as_lists(bins: Int64s, num_bins: int) -> Bins:
    indices: list[int] = np.argsort(bins.astype(np.uint16) if num_bins < 2**16 else bins, kind="stable").tolist()
    ends = np.cumsum(np.bincount(bins, minlength=num_bins)).tolist()
    return [indices[start:end] for start, end in pairwise([0, *ends])]
