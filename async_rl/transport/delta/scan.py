"""Finds changed elements and expresses each as a gap: the unchanged elements of the same exponent since the last change.

Elements of one exponent have the same distance to their neighbouring numbers, so about the same probability of being changed;
the gaps are then geometrically distributed. Elements are processed in blocks of 64: which of them have a given exponent, or
differ, is one 64-bit word, and most blocks need no more than a popcount.

Needs numba. Vectors of 64 are given to LLVM directly, which splits them into the machine's registers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir  # pyright: ignore[reportMissingTypeStubs]
from numba import extending
from numba.core import types

from async_rl.transport.delta.integer_coder import Int64s, kernel

intrinsic: Any = extending.intrinsic  # it adds arguments of its own, which pyright would miss in every call

Elements = npt.NDArray[Any]
"""uint16 or uint32; a multiple of 64 of them."""
Words = npt.NDArray[np.uint64]

TILE = 4096  # elements whose exponents are processed together: they stay in the L1 cache
NEVER = 1 << 60
ONE = np.uint64(1)


# -- 64 at once ---------------------------------------------------------------------------------------------------------


def _sixty_four(context: Any, builder: Any, array_type: Any, array: Any, at: Any) -> tuple[Any, Any]:
    """The address of 64 elements from `at` on, and their vector type."""
    vector = ir.VectorType(context.get_data_type(array_type.dtype), 64)
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [at]), vector.as_pointer()), vector


def _load(context: Any, builder: Any, array_type: Any, array: Any, at: Any) -> Any:
    address, _ = _sixty_four(context, builder, array_type, array, at)
    return builder.load(address, align=1)


def _everywhere(builder: Any, value: Any) -> Any:
    kind = ir.VectorType(value.type, 64)  # llvmlite has no types
    empty = ir.Constant(kind, ir.Undefined)  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
    first = builder.insert_element(empty, value, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(first, empty, ir.Constant(ir.VectorType(ir.IntType(32), 64), [0] * 64))


@intrinsic
def differing(_: Any, first: Any, second: Any, at: Any) -> Any:
    """differing(first, second, at): a bit for each of 64 elements."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        left = _load(context, builder, signature.args[0], args[0], args[2])
        right = _load(context, builder, signature.args[1], args[1], args[2])
        return builder.bitcast(builder.icmp_unsigned("!=", left, right), ir.IntType(64))

    return types.uint64(first, second, types.int64), generate


@intrinsic
def equal(_: Any, row: Any, at: Any, value: Any) -> Any:
    """equal(row, at, value): a bit for each of 64 bytes."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        loaded = _load(context, builder, signature.args[0], args[0], args[1])
        return builder.bitcast(builder.icmp_unsigned("==", loaded, _everywhere(builder, args[2])), ir.IntType(64))

    return types.uint64(row, types.int64, types.uint8), generate


@intrinsic
def put_shifted(_: Any, row: Any, at: Any, shift: Any, least: Any, out: Any, out_at: Any) -> Any:
    """put_shifted(row, at, shift, least, out, out_at): the low bytes of 64 elements shifted to the right, `least` at least."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        loaded = _load(context, builder, signature.args[0], args[0], args[1])
        by = _everywhere(builder, args[2])
        address, vector = _sixty_four(context, builder, signature.args[4], args[4], args[5])
        low, least = builder.trunc(builder.lshr(loaded, by), vector), _everywhere(builder, args[3])
        raised = builder.select(builder.icmp_unsigned("<", low, least), least, low)
        builder.store(raised, address, align=1)
        return context.get_dummy_value()

    return types.void(row, types.int64, row.dtype, types.uint8, out, types.int64), generate


@intrinsic
def ones(_: Any, word: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.int64(types.uint64), generate


@intrinsic
def lowest(_: Any, word: Any) -> Any:
    """The index of the lowest set bit; 64 if there is none."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 0))

    return types.int64(types.uint64), generate


# -- kernels ------------------------------------------------------------------------------------------------------------


@kernel
def find(
    old: Elements, new: Elements, shift: int, half: int, words: Words, firsts: Int64s, in_order: Int64s, counts: Int64s
) -> int:
    """The number of changed elements, or -1 when the steps of one more block might not fit into `in_order`.

    Fills `words` (a bit per changed element), `firsts` (the number of changes before each block), `in_order` (the step of
    each change) and `counts` (the number of changes for each exponent).
    """
    changed = 0
    for first in range(0, words.size, TILE >> 6):
        seen = changed
        for block in range(first, min(first + (TILE >> 6), words.size)):
            if changed + 64 > in_order.size:
                return -1
            word = words[block] = differing(old, new, block << 6)
            firsts[block] = place = changed
            changed += ones(word)
            # usually there is one or none: branching takes longer than writing two places that may be unused
            for _ in range(2):
                in_order[place] = (block << 6) + lowest(word)
                word &= word - ONE
                place += 1
            while place < changed:
                in_order[place] = (block << 6) + lowest(word)
                word &= word - ONE
                place += 1
        for place in range(seen, changed):
            at = in_order[place]
            before = np.int64(old[at])
            in_order[place] = ordered(np.int64(new[at]), half) - ordered(before, half)
            counts[(before >> shift) & 255] += 1
    return changed


@kernel
def describe(
    old: Elements, shift: int, words: Words, firsts: Int64s, in_order: Int64s, counts: Int64s, gaps: Int64s, steps: Int64s
) -> None:
    """Fill `gaps` and `steps`: for every change, sorted by exponent, the gap before it and its step."""
    exponents, tile = np.flatnonzero(counts), np.empty(TILE, np.uint8)
    since, places = np.zeros(256, np.int64), np.cumsum(counts) - counts
    for first in range(0, old.size, TILE):
        last = min(first + TILE, old.size)
        for at in range(first, last, 64):
            put_shifted(old, at, old.dtype.type(shift), np.uint8(exponents[0]), tile, at - first)
        for exponent in exponents:
            skipped, place = since[exponent], places[exponent]
            for at in range(first, last, 64):
                members, word = equal(tile, at - first, np.uint8(exponent)), words[at >> 6]
                moved = members & word
                passed = 0
                while moved:
                    below = (moved & (~moved + ONE)) - ONE
                    rank = ones(members & below)
                    gaps[place] = skipped + rank - passed
                    steps[place] = in_order[firsts[at >> 6] + ones(word & below)]
                    skipped, passed = 0, rank + 1
                    place += 1
                    moved &= moved - ONE
                skipped += ones(members) - passed
            since[exponent], places[exponent] = skipped, place


@kernel
def locate(old: Elements, shift: int, counts: Int64s, gaps: Int64s, places: Int64s) -> bool:
    """Fill `places` from `gaps`: the index of every change. False when the image has no such elements."""
    exponents, tile = np.flatnonzero(counts), np.empty(TILE, np.uint8)
    ends = np.cumsum(counts)
    nexts = ends - counts
    left = np.zeros(256, np.int64)
    for exponent in exponents:
        left[exponent] = gaps[nexts[exponent]]
    for first in range(0, old.size, TILE):
        last = min(first + TILE, old.size)
        for at in range(first, last, 64):
            put_shifted(old, at, old.dtype.type(shift), np.uint8(exponents[0]), tile, at - first)
        for exponent in exponents:
            to_skip, place, end = left[exponent], nexts[exponent], ends[exponent]
            for at in range(first, last, 64):
                members = equal(tile, at - first, np.uint8(exponent))
                remaining = ones(members)
                while to_skip < remaining:
                    for _ in range(to_skip):
                        members &= members - ONE
                    places[place] = at + lowest(members)
                    members &= members - ONE
                    remaining -= to_skip + 1
                    place += 1
                    to_skip = gaps[place] if place < end else NEVER
                to_skip -= remaining
            left[exponent], nexts[exponent] = to_skip, place
    return bool(np.all(nexts == ends))


@kernel
def move(image: Elements, half: int, places: Int64s, steps: Int64s) -> bool:
    """Move the elements at `places` by `steps`. False, and nothing is changed, when one is outside its range or the image."""
    moved = np.empty(places.size, image.dtype)
    for change in range(places.size):
        place = places[change]
        if place >= image.size:
            return False
        target = ordered(np.int64(image[place]), half) + steps[change]
        if target < -half or target >= half:
            return False
        moved[change] = target if target >= 0 else half - 1 - target
    for change in range(places.size):
        image[places[change]] = moved[change]
    return True


@kernel
def ordered(bits: int, half: int) -> int:
    """Map the bits of a float to an integer in the same order: neighbours differ by 1. -0 comes right before +0."""
    return bits if bits < half else half - 1 - bits
