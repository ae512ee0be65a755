"""Best-fit decreasing, for tens of thousands of sequences in milliseconds. Pure: lengths in, bins out.

Sequences go in classes of alike length, the longest first. In a round every bin takes at most one sequence of the class, and
all of them find theirs at once, as brackets do:

    length  9  8  8  7  6          a bin opens where its room stands, a sequence closes the bin that opened last:
    bins    [     [     [          of those that hold it, the one with the least room
    taken      ]     ]     ]

What is too long for every bin opens new ones. The shortest go one by one: they fill what is left, wherever it is.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]

CLASS = 0.6
"""A class reaches down to this share of its longest sequence ..."""
SMALLEST = 64
"""... and has at least so many."""
REST = 4096
"""So many go one by one."""


def best_fit(sizes: Int64s, capacity: int) -> list[list[int]]:
    """Bins of indices. Equal lengths keep their order."""
    order = descending(sizes, capacity)
    packing = _Packing(sizes[order], capacity)
    packing.open_for_halves()
    while packing.has_a_class:
        packing.pack_class()
    packing.pack_one_by_one()
    bins = np.argsort(packing.bin_of, kind="stable")
    ends = np.cumsum(np.bincount(packing.bin_of)).tolist()
    indices = order[bins].tolist()
    return [indices[start:end] for start, end in pairwise([0, *ends])]


def descending(sizes: Int64s, capacity: int) -> Int64s:
    """Stable: the plan depends on nothing but the lengths. Sixteen bits are sorted by radix, which is ten times as fast."""
    keys = capacity - sizes
    return np.argsort(keys.astype(np.uint16) if capacity < 2**16 else keys, kind="stable")


class _Packing:
    def __init__(self, sizes: Int64s, capacity: int) -> None:
        self._sizes, self._capacity = sizes, capacity
        self.bin_of = np.empty_like(sizes)
        self._room = np.empty_like(sizes)
        """Of each bin."""
        self._num_bins = 0
        self._next = 0
        """The first sequence that has no bin yet."""

    def _open(self, places: Int64s) -> None:
        """A bin for each of these sequences."""
        opened = np.arange(self._num_bins, self._num_bins + len(places))
        self._room[opened] = self._capacity - self._sizes[places]
        self.bin_of[places] = opened
        self._num_bins += len(places)

    def open_for_halves(self) -> None:
        """No two of them fit together."""
        self._next = int(np.searchsorted(-self._sizes, -(self._capacity // 2)))
        self._open(np.arange(self._next))

    @property
    def _class_end(self) -> int:
        alike = int(np.searchsorted(-self._sizes, -int(CLASS * self._sizes[self._next]), side="right"))
        return max(alike, self._next + SMALLEST)

    @property
    def has_a_class(self) -> bool:
        return len(self._sizes) - self._next >= REST

    def pack_class(self) -> None:
        waiting, self._next = np.arange(self._next, self._class_end), self._class_end
        while len(waiting):
            placed = self._pack_round(waiting)
            if not placed.any():
                placed[: -(-len(waiting) * int(self._sizes[waiting[0]]) // self._capacity)] = True
                self._open(waiting[placed])
            waiting = waiting[~placed]

    def _pack_round(self, waiting: Int64s) -> npt.NDArray[np.bool_]:
        """Who of them found a bin."""
        wanted = self._sizes[waiting]
        bins = np.flatnonzero(self._room[: self._num_bins] >= wanted[-1])
        bins = bins[descending(self._room[bins], self._capacity)]
        opening, closing = brackets(self._room[bins], wanted)
        self._room[bins[opening]] -= wanted[closing]
        self.bin_of[waiting[closing]] = bins[opening]
        placed = np.zeros(len(waiting), np.bool_)
        placed[closing] = True
        return placed

    def pack_one_by_one(self) -> None:
        rooms = self._room[: self._num_bins]
        open_bins = sorted(zip(rooms.tolist(), range(self._num_bins), strict=True))
        for place, size in enumerate(self._sizes[self._next :].tolist(), start=self._next):
            at = bisect_left(open_bins, (size, -1))
            if at < len(open_bins):
                room, chosen = open_bins.pop(at)
            else:
                room, chosen = self._capacity, self._num_bins
                self._num_bins += 1
            self.bin_of[place] = chosen
            if room > size:
                insort(open_bins, (room - size, chosen))


def brackets(rooms: Int64s, wanted: Int64s) -> tuple[Int64s, Int64s]:
    """Pairs of a bin and a sequence that it takes, from two descending rows. A bin that just holds a sequence does hold it."""
    place_of_bin = np.arange(len(rooms)) + np.searchsorted(-wanted, -rooms)
    step = np.full(len(rooms) + len(wanted), -1)
    step[place_of_bin] = 1
    height = np.cumsum(step)
    floor = np.minimum.accumulate(np.minimum(height, 0))
    depth = height - floor + (step < 0)  # a bracket and its partner have the same
    is_alone = (step < 0) & np.diff(floor, prepend=0).astype(np.bool_)
    depth[is_alone] = 0
    by_depth = np.argsort(depth.astype(np.uint16) if len(rooms) < 2**16 else depth, kind="stable")
    first, second = by_depth[:-1], by_depth[1:]
    is_pair = (step[first] > 0) & (step[second] < 0) & (depth[first] == depth[second])
    rank = np.empty_like(step)
    rank[step > 0], rank[step < 0] = np.arange(len(rooms)), np.arange(len(wanted))
    return rank[first[is_pair]], rank[second[is_pair]]
