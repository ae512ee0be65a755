"""Textbook packing algorithms in plain Python: lengths and a capacity in, bins of indices out."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

Bins = list[list[int]]


def next_fit(lengths: Sequence[int], capacity: int) -> Bins:
    """Next-fit: a bin that cannot take the next sequence is closed."""
    bins, room = Bins(), 0
    for index, length in enumerate(lengths):
        if length > room:
            bins.append([])
            room = capacity
        bins[-1].append(index)
        room -= length
    return bins


def first_fit_decreasing(lengths: Sequence[int], capacity: int) -> Bins:
    """First-fit decreasing."""
    bins, rooms = Bins(), list[int]()
    for index in _longest_first(lengths):
        length = lengths[index]
        chosen = next((bin_ for bin_, room in enumerate(rooms) if room >= length), len(bins))
        if chosen == len(bins):
            bins.append([])
            rooms.append(capacity)
        bins[chosen].append(index)
        rooms[chosen] -= length
    return bins


def best_fit_decreasing(lengths: Sequence[int], capacity: int) -> Bins:
    """Best-fit decreasing."""
    bins, rooms = Bins(), list[tuple[int, int]]()
    for index in _longest_first(lengths):
        at = bisect_left(rooms, (lengths[index], -1))
        if at < len(rooms):
            room, chosen = rooms.pop(at)
        else:
            room, chosen = capacity, len(bins)
            bins.append([])
        bins[chosen].append(index)
        insort(rooms, (room - lengths[index], chosen))
    return bins


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda index: -lengths[index])


# -- numbers into parts of like sums: knows no capacity --------------------------------------------------------------------


@dataclass(order=True)
class _Partition:
    """Parts with falling sums, some empty. Ordered by spread, largest first."""

    negative_spread: float
    number: int
    parts: list[tuple[float, list[int]]] = field(compare=False)


def karmarkar_karp(weights: Sequence[float], num_parts: int) -> Bins:
    """Karmarkar-Karp differencing: combine the two partitions with the largest spread, large parts with small ones."""
    heap = [
        _Partition(-weight, index, [(weight, [index]), *[(0.0, list[int]()) for _ in range(num_parts - 1)]])
        for index, weight in enumerate(weights)
    ]
    heapify(heap)
    while len(heap) > 1:
        first, second = heappop(heap), heappop(heap)
        joined = [
            (large[0] + small[0], large[1] + small[1]) for large, small in zip(first.parts, reversed(second.parts), strict=True)
        ]
        joined.sort(key=lambda part: -part[0])
        heappush(heap, _Partition(joined[-1][0] - joined[0][0], first.number, joined))
    return [members for _, members in heap[0].parts] if heap else [[] for _ in range(num_parts)]


def karmarkar_karp_shards(lengths: Sequence[int], costs: Sequence[float], capacity: int, num_shards: int) -> list[Bins]:
    """Partition into shards of similar cost, then every shard into the required number of bins of similar cost."""
    shards = karmarkar_karp(costs, num_shards)
    num_bins = max(-(-sum(lengths[index] for index in shard) // capacity) for shard in shards)
    return [
        [[shard[place] for place in bin_] for bin_ in karmarkar_karp([costs[index] for index in shard], num_bins)]
        for shard in shards
    ]
