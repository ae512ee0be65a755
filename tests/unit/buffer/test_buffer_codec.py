"""The codec: what is encoded is decoded unchanged, and invalid bytes are refused."""

from __future__ import annotations

import random
import struct
import sys
import tracemalloc
from dataclasses import replace

import msgpack
import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.payloads.codec import MAX_RECORD_BYTES, decode, encode
from async_rl.payloads.records import MAX_ITEMS, BadPayload
from async_rl.types import Failure, Message, Rollout, RolloutGroup, Sample, Status, Task, ToolCall, VersionSpan
from tests.support.payloads import ROLLOUT, SAMPLE, SCHEMA_1, SOUND, TASK, body, columns, plain, sealed

texts = st.text(max_size=20)
floats = st.floats(allow_nan=False)
numbers = st.integers(0, 2**31 - 1)
calls = st.lists(st.builds(ToolCall, name=texts, arguments=texts, id=texts), max_size=2).map(tuple)
messages = st.builds(Message, role=texts, content=texts) | st.builds(
    Message, role=texts, content=texts, tool_calls=calls, tool_call_id=texts
)
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


@settings(derandomize=True)
@given(groups)
def test_a_group_survives_the_way(group: RolloutGroup):
    assert plain(decode(encode(group))) == plain(group)


@settings(derandomize=True, max_examples=30)
@given(groups, st.integers(1_000, 20_000))
def test_compression_changes_nothing_but_the_size(group: RolloutGroup, length: int):
    wordy = replace(group, worker="a worker " * length)
    compressed = encode(wordy, compress_text=True)
    assert plain(decode(compressed)) == plain(wordy)
    assert len(compressed) < len(encode(wordy)) - 8 * length


def one_sample(length: int, **changed: object) -> RolloutGroup:
    sample = Sample(
        token_ids=np.arange(length, dtype=np.int32),
        loss_mask=np.ones(length, np.uint8),
        logprobs=np.full(length, -0.5, np.float32),
        versions=(VersionSpan(version=0, start=0, stop=length),),
    )
    rollout = Rollout(samples=(sample,), reward=1.0, status=Status.OK)
    task = Task(key="k", environment="e", prompt="p")
    return replace(RolloutGroup(id="t", task=task, rollouts=(rollout,), worker="w"), **changed)  # pyright: ignore[reportArgumentType]


def test_short_text_is_not_worth_compressing():
    assert encode(one_sample(9), compress_text=True) == encode(one_sample(9))


def test_arrays_are_aligned_read_only_views_into_the_payload():
    payload = encode(one_sample(1001))
    tracemalloc.start()
    got = decode(payload).rollouts[0].samples[0]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8000, "the arrays were copied"
    for array in (got.token_ids, got.logprobs, got.loss_mask):
        assert array.flags.aligned
        assert not array.flags.writeable


def test_arrays_of_any_layout_are_written_as_they_read():
    group = one_sample(6)
    [rollout] = group.rollouts
    [sample] = rollout.samples
    strided = replace(sample, token_ids=np.arange(12, dtype=">i4")[::2])
    got = decode(encode(replace(group, rollouts=(replace(rollout, samples=(strided,)),))))
    assert got.rollouts[0].samples[0].token_ids.tolist() == [0, 2, 4, 6, 8, 10]


# -- what cannot be written: a worker hears of it at once, not the learner later --------------------------------------
def with_sample(**changed: object) -> RolloutGroup:
    group = one_sample(4)
    [rollout] = group.rollouts
    return replace(group, rollouts=(replace(rollout, samples=(replace(rollout.samples[0], **changed),)),))  # pyright: ignore[reportArgumentType]


UNWRITABLE = [
    (one_sample(2, worker="half of a pair: \ud800"), "surrogates"),
    (one_sample(2, task=Task(key="k", environment="e", prompt="p", data={"x": {1}})), "set"),  # pyright: ignore[reportArgumentType]
    (one_sample(2, task=Task(key="k", environment="e", prompt="p", data={"x": 2**64})), "written"),
    (
        one_sample(2, task=Task(key="k", environment="e", prompt=(Message(role="r", content="c"),) * (MAX_ITEMS + 1))),
        "a list of",
    ),
    (with_sample(loss_mask=np.zeros(3, np.uint8)), "differ in length"),
    (with_sample(token_ids=np.zeros((4, 2), np.int32)), "differ in length"),
]


@pytest.mark.parametrize(("group", "reason"), UNWRITABLE, ids=lambda value: value if isinstance(value, str) else "")
def test_what_cannot_be_written_is_refused_with_its_reason(group: RolloutGroup, reason: str):
    with pytest.raises(BadPayload, match=reason):
        encode(group)


def test_too_much_text_is_neither_written_nor_read():
    with pytest.raises(BadPayload, match="above the limit"):
        encode(one_sample(2, worker="w" * MAX_RECORD_BYTES))
    with pytest.raises(BadPayload, match="above the limit"):
        decode(sealed(body(bytes(MAX_RECORD_BYTES + 1))))


# -- what cannot be read ----------------------------------------------------------------------------------------------
def rollout(**changed: object) -> bytes:
    fields = dict(zip(("samples", "reward", "status", "failure", "parts", "metrics", "said"), ROLLOUT, strict=True)) | changed
    return body(["t", TASK, [list(fields.values())], "w"])


def test_the_hand_made_body_is_sound():
    assert decode(sealed(body(SOUND))).rollouts[0].num_sampled == 1


NEWER = "newer version; upgrade the learner"
UNREADABLE = [
    (b"", "bytes"),
    (sealed(body(SOUND), magic=b"RDB!"), "does not begin"),
    (sealed(body(SOUND), schema=0), "older"),
    (sealed(body(SOUND), schema=3), f"schema 3 .*{NEWER}"),
    (sealed(body(SOUND), codec=9), f"codec 9 .*{NEWER}"),
    (sealed(body(SOUND), flags=1), f"flags 1 .*{NEWER}"),
    (sealed(body(SOUND))[:-1], "should have"),
    (sealed(body(SOUND))[:-1] + b"!", "checksum"),
    (sealed(b""), "malformed"),
    (sealed(body(b"")), "malformed"),
    (sealed(body(b"\xc1")), "malformed"),
    (sealed(body(SOUND) + b"\x00"), "malformed"),
    (sealed(body(b"\x91" * 100_000)), "malformed"),
    (sealed(body(b"\xd4\x01x")), "malformed"),
    (sealed(body(b"\x81\x01\x01")), "malformed"),
    (sealed(struct.pack("<I", 2**32 - 1) + bytes(100)), "malformed"),
    (sealed(columns(2)[:-1]), "malformed"),
    (sealed(body({})), "the group"),
    (sealed(body(SOUND[:3])), "the group"),
    (sealed(body([1, *SOUND[1:]])), "the group"),
    (sealed(body(["t", ["k", "e", 1, "", {}], [ROLLOUT], "w"])), "the task"),
    (sealed(body(["t", ["k", "e", "p", "", {"x": [1]}], [ROLLOUT], "w"])), "scalars"),
    (sealed(body(["t", ["k", "e", "p", "", {b"x": 1}], [ROLLOUT], "w"])), "scalars"),
    (sealed(rollout(reward="1")), "a rollout"),
    (sealed(rollout(status="great")), "status"),
    (sealed(rollout(failure=["a", "b"])), "a failure"),
    (sealed(rollout(parts={"x": 1})), "a metric"),
    (sealed(rollout(said=[["r", 1]])), "a message"),
    (sealed(rollout(said=[["r", "c", [["n", 1, "i"]], ""]])), "a tool call"),
    (sealed(rollout(samples=[[3, []]])), "columns"),
    (sealed(rollout(samples=[[-1, []]])), "columns"),
    (sealed(rollout(samples=[SAMPLE, SAMPLE])), "columns"),
    (sealed(rollout(samples=[[1, []]])), "left over"),
    (sealed(rollout(samples=[[2, [0, 1]]])), "malformed"),
    (sealed(rollout(samples=[[2, [0, 1, True]]])), "three integers"),
    (sealed(body(b"not zstd"), codec=1), "decompressed"),
    (sealed(body(zstandard.compress(b"\xc0") + b"x"), codec=1), "decompressed"),
    (sealed(body(zstandard.compress(bytes(MAX_RECORD_BYTES + 1))), codec=1), "announce a size"),
    (sealed(body(zstandard.ZstdCompressor(write_content_size=False).compress(b"\xc0")), codec=1), "announce a size"),
]


@pytest.mark.parametrize(("payload", "reason"), UNREADABLE, ids=[f"{n}-{reason}" for n, (_, reason) in enumerate(UNREADABLE)])
def test_what_is_no_group_is_refused_with_its_reason(payload: bytes, reason: str):
    with pytest.raises(BadPayload, match=reason):
        decode(payload)


@pytest.mark.parametrize(
    ("lie", "most_bytes"),
    [
        (b"\xdd\xff\xff\xff\xff", 2**16),
        (b"\xdd\x00\x0f\x00\x00" * 1000, 2**16),
        (b"\xdf\x00\x0f\x00\x00", 2**16),
        (b"\xc6\xff\xff\xff\xff", 2**16),
        (b"\xdd\x00\x00\x3f\xff" * 1000, 200 * 2**20),  # lists as long as ours may be, nested as deep as msgpack goes
    ],
)
def test_announced_lengths_are_not_believed(lie: bytes, most_bytes: int):
    payload = sealed(body(lie + bytes(1_000_000)))
    tracemalloc.start()
    with pytest.raises(BadPayload, match="malformed"):
        decode(payload)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < most_bytes


def test_a_bomb_is_refused_before_it_is_expanded():
    bomb = zstandard.compress(bytes(2**30))
    assert len(bomb) < 2**17
    tracemalloc.start()
    with pytest.raises(BadPayload, match="announce"):
        decode(sealed(body(bomb), codec=1))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20


# -- the previous schema ----------------------------------------------------------------------------------------------
def test_a_group_of_the_previous_schema_is_read():
    first = Sample(
        token_ids=np.array([11, 12, 13, 14], np.int32),
        loss_mask=np.array([0, 0, 1, 1], np.uint8),
        logprobs=np.array([0, 0, -0.5, -1.25], np.float32),
        versions=(VersionSpan(version=3, start=2, stop=3), VersionSpan(version=4, start=3, stop=4)),
    )
    second = Sample(
        token_ids=np.array([7, 8], np.int32),
        loss_mask=np.array([0, 1], np.uint8),
        logprobs=np.array([0, -0.25], np.float32),
        versions=(VersionSpan(version=4, start=1, stop=2),),
    )
    question = Message(role="user", content="2 + 2 = ?")
    played = Rollout(
        samples=(first, second),
        reward=0.5,
        status=Status.OK,
        reward_parts={"exact": 1.0},
        metrics={"turns": 2.0},
        conversation=(question, Message(role="assistant", content="4 ✓")),
    )
    failure = Failure(boundary="environment", kind="KeyError", message="no door")
    expected = RolloutGroup(
        id="t000000042",
        task=Task(key="sums/7", environment="sums", prompt=(question,), answer="4", data={"level": 1, "even": True}),
        rollouts=(played, Rollout(samples=(), reward=0.0, status=Status.FAILED, failure=failure)),
        worker="w1",
    )
    assert plain(decode(SCHEMA_1)) == plain(expected)
    assert plain(decode(encode(expected))) == plain(expected)


def test_arrays_of_the_previous_schema_that_differ_in_length_are_refused():
    records = msgpack.unpackb(SCHEMA_1[20:])
    sample = records[2][0][0][0]
    for shortened in range(3):
        arrays = [each[:-4] if number == shortened else each for number, each in enumerate(sample[:3])]
        records[2][0][0][0] = [*arrays, *sample[3:]]
        with pytest.raises(BadPayload, match="differ in length"):
            decode(sealed(msgpack.packb(records), schema=1))


def test_damaged_groups_of_the_previous_schema_are_refused_or_read_but_never_crash():
    draw = random.Random(seed := random.randrange(2**32))
    print(f"seed {seed}", file=sys.stderr)
    old = SCHEMA_1[20:]
    for _ in range(3000):
        damaged = bytearray(old)
        for _ in range(draw.randint(1, 4)):
            damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        try:
            decode(sealed(bytes(damaged[: draw.randint(0, len(damaged))]), schema=1))
        except BadPayload:
            continue
