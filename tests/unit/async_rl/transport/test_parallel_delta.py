"""The parallel encoding of deltas: bit for bit, for any bits; whatever else arrives is refused and changes nothing."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from async_rl.errors import WireError
from async_rl.transport.delta import parallel_codec as codec
from async_rl.transport.delta.parcel_delta import DeltaPiece, apply_piece, encoded_piece
from tests.unit.async_rl.transport.delta_cases import (
    BODY,
    HEADER,
    Bits,
    as_bytes,
    damaged,
    is_refused,
    relaxed,
    signed,
    updates,
    weights,
    with_field,
)


def image_of(elements: Bits) -> Tensor:
    """An image of whole words."""
    return torch.from_numpy(as_bytes(elements[: elements.size // 4 * 4].copy()))


def small_update(seed: int = 3, size: int = 5000) -> tuple[Tensor, Tensor, bytes]:
    """Images of bfloat16, and what leads from one to the other: small steps and some large ones."""
    rng = np.random.default_rng(seed)
    old = weights(rng, size, "bfloat16")
    new = np.where(rng.random(size) < 0.03, old + rng.choice(np.array([1, 2, 9, 20, 3000], np.uint16), size), old)
    images = image_of(old), image_of(new)
    made = codec.encode(*images, "bfloat16")
    assert made is not None
    return *images, made


@relaxed
@given(updates())
def test_any_bits_arrive(update: tuple[Bits, Bits, str]) -> None:
    old, new, (before, after) = image_of(update[0]), image_of(update[1]), update[:2]
    made = codec.encode(old, new, update[2], most_changed=1)
    if made is None:  # for so few elements, or such changes, nothing is smaller than the image
        assert update[2] == "float32" or before.size < 50 or (before != after).mean() > 0.05
        return
    assert len(made) < len(old)
    image = old.clone()
    assert codec.apply(made, image) == (old.view(torch.int16) != new.view(torch.int16)).sum()
    assert torch.equal(image, new)


@pytest.mark.parametrize("share", [0.0003, 0.003, 0.03, 0.2])
def test_a_change_costs_its_place_and_four_bits(share: float) -> None:
    """An Elias-Fano code is within a bit of log2(elements / changes) + 1; a step by one takes two bits."""
    rng = np.random.default_rng(1)
    old = weights(rng, 1 << 20, "bfloat16")
    is_changed = rng.random(old.size) < share
    made = codec.encode(image_of(old), image_of(np.where(is_changed, old ^ 1, old)), "bfloat16")
    assert made is not None
    changes = int(is_changed.sum())
    assert 8 * len(made) < changes * (math.log2(old.size / changes) + 4) + 8 * 64 + (old.size >> 8)


def test_an_unchanged_image_costs_its_header() -> None:
    image, _, _ = small_update()
    made = codec.encode(image, image, "bfloat16")
    assert made is not None
    assert len(made) == BODY
    assert codec.apply(made, image.clone()) == 0


def test_what_gains_nothing_is_sent_whole() -> None:
    rng = np.random.default_rng(2)
    old = weights(rng, 1 << 16, "bfloat16")
    images = [image_of(np.where(rng.random(old.size) < share, old ^ 1, old)) for share in (0.0, 0.3, 1.0)]
    assert codec.encode(images[0], images[1], "bfloat16") is None
    assert codec.encode(images[0], images[2], "bfloat16") is None
    assert codec.encode(images[0], images[0], "float32") is None
    assert codec.encode(images[0][:0], images[0][:0], "bfloat16") is None
    assert codec.encode(images[0][:6], images[0][:6], "bfloat16") is None


def refuses(made: bytes, old: Tensor) -> bool:
    return is_refused(lambda made, image: codec.apply(made, torch.from_numpy(image)), made, old.numpy())


def test_a_damaged_delta_is_refused() -> None:
    old, _, made = small_update()
    assert all(refuses(each, old) for each in damaged(made))
    assert refuses(made, old[:-8])


@relaxed
@given(st.data())
def test_a_forged_delta_reaches_no_other_memory(data: st.DataObject) -> None:
    """With a digest that fits, anything may be claimed. It is refused, or it changes the image and nothing beside it."""
    old, _, made = small_update()
    fields, body = list(HEADER.unpack_from(made)), bytearray(made[BODY:])
    for _ in range(data.draw(st.integers(0, 4))):
        at = data.draw(st.integers(0, len(body) - 1))
        body[at] = data.draw(st.integers(0, 255))
    body = body[: data.draw(st.sampled_from([len(body), len(body) - 1, len(body) // 2, 0]))]
    for field in (1, 4, 5):
        fields[field] = data.draw(st.just(fields[field]) | st.integers(0, 12 if field == 1 else 300))
    margin = torch.full((4096,), 0xA5, dtype=torch.uint8)
    memory = torch.cat([margin, old, margin])
    image = memory[len(margin) : -len(margin)]
    try:
        codec.apply(signed(HEADER.pack(*fields), bytes(body)), image)
    except WireError:
        assert torch.equal(image, old)
    assert torch.equal(memory[: len(margin)], margin)
    assert torch.equal(memory[-len(margin) :], margin)


def test_a_step_beyond_the_largest_number_is_refused() -> None:
    old = image_of(np.array([0, 0x7FFF] + [0] * 126, np.uint16))
    new = image_of(np.array([0, 0x7FFE] + [0] * 126, np.uint16))
    made = codec.encode(old, new, "bfloat16")
    assert made is not None
    assert codec.apply(made, image := old.clone()) == 1
    assert torch.equal(image, new)
    low_bits = made[1]
    body = bytearray(made[BODY:])
    body[low_bits] = 0  # the sign, behind a byte for each of the low bits
    assert refuses(signed(made[: HEADER.size], bytes(body)), old)


@pytest.mark.parametrize(
    ("field", "value"),
    [(0, 1), (1, 9), (1, 0), (3, 2**32 - 1), (3, 0), (4, 2**32 - 1), (4, 3), (4, 0), (5, 2**32 - 1), (5, 0)],
)
def test_a_header_is_not_believed(field: int, value: int) -> None:
    old, _, made = small_update()
    assert refuses(with_field(made, field, value), old)


def test_without_room_on_the_gpu_a_piece_is_sent_whole_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    old, new, made = small_update()
    piece = DeltaPiece(start=0, stop=len(old), dtype="bfloat16", encoding="parallel")
    assert encoded_piece(piece, old, new) == made

    def has_no_room(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(codec, "encode", has_no_room)
    monkeypatch.setattr(codec, "apply", has_no_room)
    assert encoded_piece(piece, old, new) == new.numpy().tobytes()
    with pytest.raises(WireError, match="no room"):
        apply_piece(piece, np.frombuffer(made, np.uint8), old)
