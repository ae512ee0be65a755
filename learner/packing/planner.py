"""Which sequence goes into which bin of which data-parallel shard. Pure, deterministic, lengths in and indices out.

The number of bins is within a few of the best possible. What is left to choose makes ranks that run side by side finish
together: bins go in rows of like cost, one bin for every shard, and a shard that got more gets the cheapest of its row.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from learner.packing.best_fit import Int64s, best_fit, descending, fewest_bins
from learner.packing.cost import TYPICAL, Cost
from learner.packing.lock_step import by_cost, even, rows_alike

Bins = list[list[int]]

EVENED_OUT = 8192
"""So many sequences are evened out as a whole; of more, the bins of a row are alike anyway."""
TIGHT = 0.985
"""Where bins must be filled to this share, evening out would fail."""
SCALE = 2**40
"""Of costs as integers, which are exact and quick to compare."""


def plan(
    lengths: Sequence[int] | npt.NDArray[np.integer],
    capacity: int,
    num_shards: int = 1,
    *,
    multiple: int = 1,
    bins_multiple: int = 1,
    cost: Cost = TYPICAL,
) -> list[Bins]:
    """shard -> bin -> indices of sequences. No bin exceeds `capacity`, but for a longer sequence, which has one to itself.
    Every shard has as many bins (some may be empty).

    A sequence takes the room of the next `multiple` of its tokens; a shard has a multiple of `bins_multiple` bins.
    """
    slots = -(-np.asarray(lengths, dtype=np.int64) // multiple) * multiple
    if not slots.size:
        return [[] for _ in range(num_shards)]
    rooms = np.minimum(slots, capacity)  # what is longer leaves no room in its bin
    order = descending(rooms, capacity)
    places, num_rows = _rows(rooms[order], cost.of(slots[order]), capacity, num_shards, bins_multiple)
    of_sequence = np.empty_like(places)
    of_sequence[order] = places
    bins = _as_lists(of_sequence, num_rows * num_shards)
    return [bins[shard * num_rows : (shard + 1) * num_rows] for shard in range(num_shards)]


def _rows(
    sizes: Int64s, exact_costs: npt.NDArray[np.float64], capacity: int, width: int, bins_multiple: int
) -> tuple[Int64s, int]:
    """Of descending sizes: each sequence's place, shard x rows + row, and the number of rows."""
    costs = np.rint(exact_costs * (SCALE / exact_costs.sum())).astype(np.int64)
    places, num_rows = None, 0
    if width > 1 and len(sizes) <= EVENED_OUT:
        num_rows = _up_to(fewest_bins(sizes, capacity), width * bins_multiple) // width
        if sizes.sum() <= TIGHT * capacity * num_rows * width:
            places = rows_alike(sizes, costs, capacity, num_rows=num_rows, width=width)
    if places is None:
        places, num_bins = _fullest(sizes, costs, capacity, width * bins_multiple)
        num_rows = num_bins // width
    return (_dealt(places, costs, num_rows, width) if width > 1 else places), num_rows


def _up_to(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _fullest(sizes: Int64s, costs: Int64s, capacity: int, multiple: int) -> tuple[Int64s, int]:
    """As few bins as we find, in order of falling cost; what the last of them hold is spread over those that must be."""
    bins = best_fit(sizes, capacity)
    num_bins = int(bins.max()) + 1
    wanted = _up_to(num_bins, multiple)
    places, _ = by_cost(bins, costs, num_bins)
    last = np.flatnonzero(places >= wanted - multiple)
    if wanted > num_bins and (spread := even(sizes[last], costs[last], capacity, multiple)) is not None:
        places[last] = wanted - multiple + by_cost(spread, costs[last], multiple)[0]
    return places, wanted


def _dealt(places: Int64s, costs: Int64s, num_rows: int, width: int) -> Int64s:
    """From row x width + column to shard x rows + row: of each row, the costliest bin to the lightest shard.

    The rows that differ most within come first, so that the others can make up for it.
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
