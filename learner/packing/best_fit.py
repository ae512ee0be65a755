"""Best-fit decreasing, for tens of thousands of sequences in milliseconds. Pure: lengths in, bins out.

Sequences are processed in classes of similar length, longest first. In a round every bin takes at most one sequence of the
class, and all pairs are found at once by bracket matching:

    length  9  8  8  7  6          a bin opens at its remaining room, a sequence closes the bin that opened last:
    bins    [     [     [          of those that can hold it, the one with the least room
    taken      ]     ]     ]

Sequences that fit no bin open new ones. The shortest are placed one by one into the remaining room.
"""

from __future__ import annotations

from bisect import bisect_right, insort

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]

CLASS_RATIO = 0.6
"""The shortest sequence of a class has this share of the longest ..."""
MIN_CLASS = 64
"""... and a class has at least this many sequences."""
ONE_BY_ONE = 1024
"""This many of the shortest are placed one by one."""
BIN_BITS = 32
BIN_MASK = (1 << BIN_BITS) - 1
"""A bin and a number above it are one integer, which is quick to compare: the lower bits are the bin."""


def best_fit(sizes: Int64s, capacity: int) -> Int64s:
    """Return the bin of each sequence, for descending sizes; bins are numbered from 0."""
    packing = _Packing(sizes, capacity)
    packing.open_for_halves()
    while packing.has_a_class:
        packing.pack_class()
    packing.pack_one_by_one()
    return packing.bin_of


def fewest_bins(sizes: Int64s, capacity: int) -> int:
    """Martello and Toth's bound L2 for descending sizes: no packing has fewer bins.

    For every K: sequences longer than capacity - K share no bin with one of K or more tokens, two sequences above half never
    share one, and the rest down to K must fit into their remaining room or into further bins.
    """
    halves = int(np.searchsorted(-sizes, -(capacity // 2)))
    if halves == len(sizes):
        return halves
    tokens = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
    smallest = sizes[halves:]
    alone = np.searchsorted(-sizes[:halves], -(capacity - smallest))
    room = (halves - alone) * capacity - (tokens[halves] - tokens[alone])
    beyond = tokens[halves + 1 :] - tokens[halves] - room
    return halves + max(0, int((-(-beyond // capacity)).max()))


def descending_order(sizes: Int64s, capacity: int) -> Int64s:
    """Stable: the plan depends on nothing but the lengths. Sixteen bits are sorted by radix, which is ten times as fast."""
    keys = capacity - sizes
    return np.argsort(keys.astype(np.uint16) if capacity < 2**16 else keys, kind="stable")


class _Packing:
    def __init__(self, sizes: Int64s, capacity: int) -> None:
        self._sizes, self._capacity = sizes, capacity
        self.bin_of = np.empty_like(sizes)
        self._room = np.empty_like(sizes)
        """Remaining room of each bin."""
        self._num_bins = 0
        self._next = 0
        """Index of the first sequence without a bin."""

    def open_for_halves(self) -> None:
        """Give each sequence above half of the capacity a bin: no two of them fit together."""
        self._next = int(np.searchsorted(-self._sizes, -(self._capacity // 2)))
        if self._next:
            self._open(self._next, np.arange(self._next))

    @property
    def has_a_class(self) -> bool:
        return len(self._sizes) - self._next >= ONE_BY_ONE

    def pack_class(self) -> None:
        alike = int(np.searchsorted(-self._sizes, -int(CLASS_RATIO * self._sizes[self._next]), side="right"))
        end = max(alike, self._next + MIN_CLASS)
        waiting, self._next = np.arange(self._next, end), end
        while len(waiting):
            left = self._pack_round(waiting)
            if len(left) == len(waiting):
                needed = -(-int(self._sizes[waiting].sum()) // self._capacity)
                left = waiting[self._open(needed, waiting) :]
            waiting = left

    def _open(self, num_bins: int, waiting: Int64s) -> int:
        """Open new bins, each with as many neighbours as certainly fit. Returns how many sequences they took."""
        alike = self._capacity // int(self._sizes[waiting[0]])
        taken = waiting[: alike * num_bins]
        self.bin_of[taken] = self._num_bins + np.arange(len(taken)) // alike
        starts = np.arange(0, len(taken), alike)
        self._room[self._num_bins : self._num_bins + len(starts)] = self._capacity - np.add.reduceat(self._sizes[taken], starts)
        self._num_bins += len(starts)
        return len(taken)

    def _pack_round(self, waiting: Int64s) -> Int64s:
        """Run one round; return the sequences that found no bin."""
        wanted = self._sizes[waiting]
        bins = np.flatnonzero(self._room[: self._num_bins] >= wanted[-1])
        bins = bins[descending_order(self._room[bins], self._capacity)]
        opening, closing = matched_pairs(self._room[bins], wanted)
        self._room[bins[opening]] -= wanted[closing]
        self.bin_of[waiting[closing]] = bins[opening]
        is_left = np.ones(len(waiting), np.bool_)
        is_left[closing] = False
        return waiting[is_left]

    def pack_one_by_one(self) -> None:
        rest = self._sizes[self._next :].tolist()
        if not rest:
            return
        shortest, num_bins, chosen_bins = rest[-1], self._num_bins, list[int]()
        rooms = self._room[:num_bins]
        usable = np.flatnonzero(rooms >= shortest)
        # one integer per bin, and the tightest bins last, where lists are quick to change
        open_bins: list[int] = np.sort(usable - (rooms[usable] << BIN_BITS)).tolist()
        for size in rest:
            at = bisect_right(open_bins, BIN_MASK - (size << BIN_BITS)) - 1
            if at >= 0:
                key = open_bins.pop(at)
                room, chosen = -(key >> BIN_BITS) - size, key & BIN_MASK
            else:
                room, chosen = self._capacity - size, num_bins
                num_bins += 1
            chosen_bins.append(chosen)
            if room >= shortest:
                insort(open_bins, chosen - (room << BIN_BITS))
        self.bin_of[self._next :] = chosen_bins


def matched_pairs(rooms: Int64s, wanted: Int64s) -> tuple[Int64s, Int64s]:
    """Match bins and sequences, both in descending order; a bin whose room equals a sequence takes it. Returns the pairs."""
    place_of_bin = np.arange(len(rooms)) + np.searchsorted(-wanted, -rooms)
    step = np.full(len(rooms) + len(wanted), -1)
    step[place_of_bin] = 1
    height = np.cumsum(step)
    floor = np.minimum.accumulate(np.minimum(height, 0))
    depth = height - floor + (step < 0)  # equal for a bracket and its partner
    is_alone = (step < 0) & np.diff(floor, prepend=0).astype(np.bool_)
    depth[is_alone] = 0
    by_depth = np.argsort(depth.astype(np.uint16) if len(rooms) < 2**16 else depth, kind="stable")
    first, second = by_depth[:-1], by_depth[1:]
    is_pair = (step[first] > 0) & (step[second] < 0) & (depth[first] == depth[second])
    rank = np.empty_like(step)
    rank[step > 0], rank[step < 0] = np.arange(len(rooms)), np.arange(len(wanted))
    return rank[first[is_pair]], rank[second[is_pair]]
