"""Group bins into rows of similar cost: ranks run the bins of a row at the same time and wait for the costliest.

          rank 0      rank 1      rank 2
row 0    ████████    ██████░░    ███████░     the costliest bin of a row is its ceiling; up to it the other bins
row 1    █████       █████       █████        take sequences (░) from later rows, which become cheaper
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush, heapreplace

import numpy as np

from learner.packing.best_fit import BIN_BITS, BIN_MASK, Int64s

TOP_UP_LIMIT = 6144
"""Limit on sequences examined while rows are topped up (a few milliseconds). With many rows, later ones are alike anyway."""
NO_LIMIT = 2**62


def balanced_rows(sizes: Int64s, costs: Int64s, capacity: int, *, num_rows: int, width: int) -> Int64s | None:
    """For descending sizes return each sequence's place, row x width + column; None if balanced bins exceed the capacity.

    The bins of a row are in order of falling cost.
    """
    places = np.empty_like(sizes)
    rest = np.arange(len(sizes))
    last = min(TOP_UP_LIMIT // len(sizes), num_rows - 1)
    for row in range(last + 1):
        bins = balanced_bins(sizes[rest], costs[rest], capacity, (num_rows - row) * width)
        if bins is None:
            return None
        columns, loads = ranked_by_cost(bins, costs[rest], (num_rows - row) * width)
        places[rest] = row * width + columns
        if row == last:
            break
        is_here = columns < width
        waiting = rest[~is_here]
        here = np.bincount(columns[is_here], weights=sizes[rest[is_here]], minlength=width).astype(np.int64)
        found = fill_cheapest(sizes[waiting], costs[waiting], capacity - here, loads[:width], ceiling=int(loads[0]))
        places[waiting[found >= 0]] = row * width + found[found >= 0]
        rest = waiting[found < 0]
    return places


def ranked_by_cost(bins: Int64s, costs: Int64s, num_bins: int) -> tuple[Int64s, Int64s]:
    """Return the position of each sequence's bin in order of falling cost, and the costs in that order."""
    loads = np.bincount(bins, weights=costs, minlength=num_bins).astype(np.int64)
    order = np.argsort(-loads, kind="stable")
    rank = np.empty(num_bins, np.int64)
    rank[order] = np.arange(num_bins)
    return rank[bins], loads[order]


def balanced_bins(sizes: Int64s, costs: Int64s, capacity: int, num_bins: int) -> Int64s | None:
    """Assign sequences to bins of similar cost; None if one of them would overflow."""
    first, others = slice(num_bins), slice(num_bins, None)
    rooms, loads = np.full(num_bins, capacity), np.zeros(num_bins, np.int64)
    rooms[: len(sizes)] -= sizes[first]
    loads[: len(sizes)] = costs[first]
    bins = np.concatenate([np.arange(num_bins)[: len(sizes)], fill_cheapest(sizes[others], costs[others], rooms, loads)])
    return bins if (bins >= 0).all() else None


def fill_cheapest(sizes: Int64s, costs: Int64s, rooms: Int64s, loads: Int64s, *, ceiling: int = NO_LIMIT) -> Int64s:
    """Put each sequence, longest first, into the cheapest bin with room that stays below the ceiling; -1 if there is none."""
    found, room_of = list[int](), rooms.tolist()
    cheapest = [(load << BIN_BITS) | bin_ for bin_, load in enumerate(loads.tolist())]
    heapify(cheapest)
    too_full: list[tuple[int, int]] = []  # for the current length; the bins with the most room return first
    limit = (ceiling + 1) << BIN_BITS
    for size, cost in zip(sizes.tolist(), costs.tolist(), strict=True):
        while too_full and -too_full[0][0] >= size:
            heappush(cheapest, heappop(too_full)[1])
        while cheapest and room_of[cheapest[0] & BIN_MASK] < size:
            key = heappop(cheapest)
            heappush(too_full, (-room_of[key & BIN_MASK], key))
        if not cheapest or cheapest[0] + (cost << BIN_BITS) >= limit:
            found.append(-1)
            continue
        key = heapreplace(cheapest, cheapest[0] + (cost << BIN_BITS))
        room_of[key & BIN_MASK] -= size
        found.append(key & BIN_MASK)
    return np.array(found, np.int64)
