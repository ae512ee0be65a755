"""Bytes in Redis are somebody else's until they have been checked."""

from __future__ import annotations

import random
import struct

import msgpack
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.types import Failure, Message, Rollout, RolloutGroup, Sample, Status, Task, VersionSpan
from buffer.codec import BadPayload, decode, encode

HEADER = struct.Struct("<4sHBxIQ")

texts = st.text(max_size=20)
floats = st.floats(allow_nan=False)
numbers = st.integers(0, 2**31 - 1)
messages = st.builds(Message, role=texts, content=texts)
spans = st.builds(VersionSpan, version=st.integers(0, 2**40), start=numbers, stop=numbers)


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    length = draw(st.integers(0, 50))
    noise = np.random.default_rng(draw(st.integers(0, 2**32)))
    return Sample(
        token_ids=noise.integers(-(2**31), 2**31, length, dtype=np.int32),
        loss_mask=noise.integers(0, 2, length, dtype=np.uint8),
        logprobs=noise.standard_normal(length).astype(np.float32),
        versions=tuple(draw(st.lists(spans, max_size=3))),
    )


rollouts = st.builds(
    Rollout,
    samples=st.lists(samples(), max_size=3).map(tuple),
    reward=floats,
    status=st.sampled_from(Status),
    failure=st.none() | st.builds(Failure, boundary=texts, kind=texts, message=texts),
    reward_parts=st.dictionaries(texts, floats, max_size=3),
    metrics=st.dictionaries(texts, floats, max_size=3),
    conversation=st.lists(messages, max_size=3).map(tuple),
)
tasks = st.builds(
    Task,
    key=texts,
    environment=texts,
    prompt=texts | st.lists(messages, max_size=3).map(tuple),
    answer=texts,
    data=st.dictionaries(texts, texts | st.integers(-(2**63), 2**63 - 1) | floats | st.booleans(), max_size=3),
)
groups = st.builds(RolloutGroup, id=texts, task=tasks, rollouts=st.lists(rollouts, max_size=3).map(tuple), worker=texts)


def plain(value: object) -> object:
    """Comparable with ==: arrays become their bytes and type."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.tobytes()
    if hasattr(value, "__dataclass_fields__"):
        return {name: plain(getattr(value, name)) for name in value.__dataclass_fields__}
    return [plain(element) for element in value] if isinstance(value, tuple) else value


@settings(derandomize=True, deadline=None)
@given(groups)
def test_a_group_survives_the_way(group: RolloutGroup):
    assert plain(decode(encode(group))) == plain(group)


def sealed(body: object, *, magic: bytes = b"ARLG", schema: int = 1, codec: int = 0) -> bytes:
    packed = body if isinstance(body, bytes) else msgpack.packb(body)
    return HEADER.pack(magic, schema, codec, len(packed), xxhash.xxh3_64_intdigest(packed)) + packed


TASK = ["k", "e", "p", "", {}]
SAMPLE = [b"\x00" * 8, b"\x00\x01", b"\x00" * 8, [0, 1, 2]]
ROLLOUT = [[SAMPLE], 1.0, "ok", None, {}, {}, []]
SOUND = ["t", TASK, [ROLLOUT], "w"]


def test_the_hand_made_body_is_sound():
    assert decode(sealed(SOUND)).rollouts[0].num_sampled == 1


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"", "bytes"),
        (sealed(SOUND, magic=b"RDB!"), "does not begin"),
        (sealed(SOUND, schema=2), "schema 2 is unknown"),
        (sealed(SOUND, codec=9), "codec 9"),
        (sealed(SOUND)[:-1], "should have"),
        (sealed(SOUND)[:-1] + b"!", "checksum"),
        (sealed(b"\xc1"), "malformed"),
        (sealed(b"\x91" * 100_000), "malformed"),
        (sealed(b"\xdd\xff\xff\xff\xff"), "malformed"),
        (sealed(b"\xd4\x01x"), "group is a list"),
        (sealed({}), "group is a list"),
        (sealed(SOUND[:3]), "group is a list of 4"),
        (sealed([1, *SOUND[1:]]), "text"),
        (sealed(["t", TASK, [[[SAMPLE], "1", "ok", None, {}, {}, []]], "w"]), "number"),
        (sealed(["t", TASK, [[[SAMPLE], 1.0, "great", None, {}, {}, []]], "w"]), "malformed"),
        (sealed(["t", TASK, [[[["x", *SAMPLE[1:]]], 1.0, "ok", None, {}, {}, []]], "w"]), "array"),
        (sealed(["t", TASK, [[[[b"odd", *SAMPLE[1:]]], 1.0, "ok", None, {}, {}, []]], "w"]), "malformed"),
        (sealed(["t", TASK, [[[[*SAMPLE[:3], [0, 1]]], 1.0, "ok", None, {}, {}, []]], "w"]), "incomplete"),
        (sealed(["t", TASK, [[[[*SAMPLE[:3], [0, 1, True]]], 1.0, "ok", None, {}, {}, []]], "w"]), "whole number"),
        (sealed(["t", ["k", "e", "p", "", {"x": [1]}], [ROLLOUT], "w"]), "scalar"),
    ],
)
def test_what_is_no_group_is_refused_with_its_reason(payload: bytes, reason: str):
    with pytest.raises(BadPayload, match=reason):
        decode(payload)


def test_damaged_bodies_with_a_valid_checksum_are_refused_or_read_but_never_crash():
    draw = random.Random(7)
    body = msgpack.packb(SOUND)
    for _ in range(20_000):
        damaged = bytearray(body)
        for _ in range(draw.randint(1, 4)):
            damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        try:
            decode(sealed(bytes(damaged[: draw.randint(0, len(damaged))])))
        except BadPayload:
            continue
