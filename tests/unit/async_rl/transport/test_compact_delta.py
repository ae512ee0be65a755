"""The compact encoding of deltas: bit for bit, for any bits; whatever else arrives is refused and changes nothing."""

from __future__ import annotations

import struct
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.errors import WireError
from async_rl.transport.delta import compact_codec as codec
from tests.unit.async_rl.transport.delta_cases import (
    BODY,
    HEADER,
    Bits,
    any_bits,
    as_bytes,
    damaged,
    is_refused,
    relaxed,
    signed,
    updates,
    weights,
    with_field,
)

pytest.importorskip("numba", reason="compact deltas need numba: pip install 'async-rl[delta]'")


def small_update(seed: int = 3, size: int = 5000) -> tuple[codec.Image, codec.Image, bytes]:
    """Images of bfloat16, and what leads from one to the other."""
    rng = np.random.default_rng(seed)
    old = weights(rng, size, "bfloat16")
    new = np.where(rng.random(size) < 0.03, old + np.uint16(1), old)
    made = codec.encode(as_bytes(old), as_bytes(new), "bfloat16")
    assert made is not None
    return as_bytes(old), as_bytes(new), made


@relaxed
@given(updates())
def test_any_bits_arrive(update: tuple[Bits, Bits, str]) -> None:
    old, new, dtype = update
    made = codec.encode(as_bytes(old), as_bytes(new), dtype, most_changed=1)
    if made is None:  # for so few elements, or such changes, nothing is smaller than the image
        assert old.size < 50 or (old != new).mean() > 0.05
        return
    assert len(made) < old.nbytes
    image = as_bytes(old.copy())
    assert codec.apply(made, image) == np.count_nonzero(old != new)
    assert np.array_equal(image, as_bytes(new))


@relaxed
@given(st.lists(st.lists(st.integers(0, 2**33 - 1) | st.integers(0, 9), min_size=30, max_size=30), min_size=1, max_size=3))
def test_numbers_arrive(lists: list[list[int]]) -> None:
    from async_rl.transport.delta.integer_coder import decode_integers, encode_integers

    decisions, rests = np.empty(9000, np.uint8), np.empty(9000, np.uint8)
    num_decisions, num_rests = encode_integers(np.array(lists, np.int64), decisions, rests)
    found = np.zeros((len(lists), len(lists[0])), np.int64)
    assert decode_integers(decisions[:num_decisions], rests[:num_rests], found)
    assert found.tolist() == lists
    assert not decode_integers(decisions[: num_decisions - 1], rests[:num_rests], found)
    assert encode_integers(np.array(lists, np.int64), decisions[:39], rests) == (-1, -1)


def test_streams_are_not_read_beyond_their_end() -> None:
    from async_rl.transport.delta.integer_coder import decode_integers, encode_integers

    numbers = np.random.default_rng(6).geometric(0.01, (1, 10_000))
    decisions, rests = np.empty(1 << 16, np.uint8), np.empty(1 << 16, np.uint8)
    num_decisions, num_rests = encode_integers(numbers, decisions, rests)
    for enough_decisions, enough_rests in ((num_decisions // 2, num_rests), (num_decisions, num_rests // 2), (3, num_rests)):
        found = np.full_like(numbers, -1)
        assert not decode_integers(
            decisions[:enough_decisions], rests[:enough_rests], found
        )  # what was cut off still lies there
        assert np.count_nonzero(found == -1) > 4000
    found[:] = -1
    assert not decode_integers(np.zeros(9000, np.uint8), np.full(9000, 255, np.uint8), found)  # numbers of 63 bits
    assert np.all(found == -1)


def test_a_change_costs_what_it_tells() -> None:
    """Of N(0, 0.02) weights that all try to move by 1e-6, about those arrive that are small enough for it to show."""
    rng = np.random.default_rng(1)
    old = weights(rng, 1 << 20, "bfloat16")
    exponents = (old >> 7) & 255
    chance = np.minimum(1e-6 / np.exp2(exponents.astype(np.float64) - 127 - 7), 1)
    changed = rng.random(old.size) < chance
    new = np.where(changed, old ^ 1, old)
    made = codec.encode(as_bytes(old), as_bytes(new), "bfloat16")
    assert made is not None
    sizes, moved = np.bincount(exponents), np.bincount(exponents, changed)
    share = np.clip(moved[sizes > 0] / sizes[sizes > 0], 1e-9, 1 - 1e-9)
    surprise = -(share * np.log2(share) + (1 - share) * np.log2(1 - share))
    least_bits = (sizes[sizes > 0] * surprise).sum() + changed.sum()  # where, and the sign
    assert 8 * len(made) < 1.06 * least_bits


def test_an_unchanged_chunk_costs_next_to_nothing() -> None:
    image, _, _ = small_update()
    made = codec.encode(image, image, "bfloat16")
    assert made is not None
    assert len(made) < 32
    assert codec.apply(made, image.copy()) == 0


def test_what_gains_nothing_is_sent_whole() -> None:
    rng = np.random.default_rng(2)
    old = weights(rng, 1 << 16, "float32")
    assert codec.encode(as_bytes(old), as_bytes(old + np.uint32(1)), "float32") is None
    assert (
        codec.encode(as_bytes(old), as_bytes(np.where(rng.random(old.size) < 0.3, old + np.uint32(1), old)), "float32") is None
    )
    assert codec.encode(as_bytes(old), as_bytes(old), "int8") is None
    assert codec.encode(as_bytes(old[:0]), as_bytes(old[:0]), "float32") is None
    assert codec.encode(as_bytes(old), as_bytes(any_bits(rng, old.size, "float32")), "float32", most_changed=1) is None


def test_threads_share_the_chunks() -> None:
    chunks = [small_update(seed, 40_000) for seed in range(8)]
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda chunk: codec.encode(chunk[0], chunk[1], "bfloat16"), chunks))
        images = [old.copy() for old, _, _ in chunks]
        list(pool.map(lambda pair: codec.apply(*pair), zip(made, images, strict=True)))
    assert all(np.array_equal(image, new) for image, (_, new, _) in zip(images, chunks, strict=True))


def test_a_damaged_delta_is_refused() -> None:
    old, _, made = small_update()
    assert all(is_refused(codec.apply, each, old) for each in damaged(made))
    assert is_refused(codec.apply, made, old[:-2])


@relaxed
@given(st.data())
def test_a_forged_delta_reaches_no_other_memory(data: st.DataObject) -> None:
    """With a digest that fits, anything may be claimed. It is refused, or it changes the image and nothing beside it."""
    old, _, made = small_update()
    body = bytearray(made[BODY:])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(body) - 1))
        body[at] = data.draw(st.integers(0, 255))
    margin = np.full(4096, 0xA5, np.uint8)
    memory = np.concatenate([margin, old, margin])
    image = memory[margin.size : -margin.size]
    try:
        codec.apply(signed(made[: HEADER.size], bytes(body)), image)
    except WireError:
        assert np.array_equal(image, old)
    assert np.array_equal(memory[: margin.size], margin)
    assert np.array_equal(memory[-margin.size :], margin)


def test_a_step_beyond_the_largest_number_is_refused() -> None:
    from async_rl.transport.delta.integer_coder import encode_integers

    decisions, rests = np.empty(99, np.uint8), np.empty(99, np.uint8)
    ends = encode_integers(np.array([[1], [0]]), decisions, rests)  # the second element moves by 1
    old = np.array([0x7FFF] * 2 + [0] * 126, np.uint16)
    exponents = bytes([255]) + struct.pack("<I", 1)
    streams = decisions[: ends[0]].tobytes() + rests[: ends[1]].tobytes()
    head = HEADER.pack(1, 1, 1, old.size, *ends)
    down, image = signed(head, exponents + streams + bytes([0x80])), old.copy()
    assert codec.apply(down, as_bytes(image)) == 1
    assert image[1] == 0x7FFE
    assert is_refused(codec.apply, signed(head, exponents + streams + bytes([0])), as_bytes(old))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        (0, 2),
        (1, 0),
        (1, 3),
        (1, 99),
        (2, 0),
        (2, 257),
        (2, 65535),
        (3, 2**32 - 1),
        (3, 0),
        (4, 2**32 - 1),
        (4, 3),
        (5, 2**32 - 1),
    ],
)
def test_a_header_is_not_believed(field: int, value: int) -> None:
    old, _, made = small_update()
    assert is_refused(codec.apply, with_field(made, field, value), old)


def test_a_claim_is_not_allocated() -> None:
    """A billion changes of one exponent, said in a few bytes."""
    old, _, _ = small_update()
    head = HEADER.pack(1, 1, 1, old.size // 2, 4, 0)
    assert is_refused(
        codec.apply, signed(head, bytes([120]) + struct.pack("<I", 1 << 30) + bytes(4)), old
    )  # warms up what raising needs
    tracemalloc.start()
    assert is_refused(codec.apply, signed(head, bytes([120]) + struct.pack("<I", 1 << 30) + bytes(4)), old)
    assert is_refused(codec.apply, signed(head, bytes([120]) + struct.pack("<I", 1 << 25) + bytes(4 + (1 << 22))), old)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20 << 20
