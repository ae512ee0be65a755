"""Ten thousand damaged payloads: each is refused with a reason, or is a valid group.

Most damaged payloads get the right length and checksum again, so that the damage reaches the readers.
"""

from __future__ import annotations

import gc
import random
import struct
import sys
import tracemalloc

import msgpack
import numpy as np
import zstandard

from async_rl.payloads.codec import decode, encode
from async_rl.payloads.records import BadPayload
from async_rl.types import Failure, Message, Rollout, RolloutGroup, Sample, Status, Task, VersionSpan
from buffer.payloads.validation import problem_with
from tests.support.payloads import HEADER, SCHEMA_1, body, plain, sealed

ROUNDS = 10_000
GROWTH_BYTES = 2 * 2**20
"""Allowed growth of the memory in use, between an early and the last round."""
PEAK_BYTES = 256 * 2**20


def decode_checked() -> RolloutGroup:
    def sample(length: int, prompt: int) -> Sample:
        sampled = np.arange(length) >= prompt
        return Sample(
            token_ids=np.arange(length, dtype=np.int32),
            loss_mask=sampled.astype(np.uint8),
            logprobs=np.where(sampled, -0.5, 0).astype(np.float32),
            versions=(
                VersionSpan(version=3, start=prompt, stop=prompt + 1),
                VersionSpan(version=4, start=prompt + 1, stop=length),
            ),
        )

    said = (Message(role="user", content="What is it? " * 40), Message(role="assistant", content="It is four. " * 40))
    good = Rollout(
        samples=(sample(40, 10), sample(7, 3)), reward=0.5, status=Status.OK, reward_parts={"exact": 1.0}, conversation=said
    )
    failure = Failure(boundary="reward", kind="ValueError", message="none")
    failed = Rollout(samples=(), reward=0.0, status=Status.FAILED, failure=failure, metrics={"turns": 2.0})
    task = Task(key="k", environment="e", prompt=said[:1], answer="4", data={"level": 1, "hard": True, "x": 0.5, "t": "s"})
    return RolloutGroup(id="t000000001", task=task, rollouts=(good, failed), worker="w")


SOUND = [encode(decode_checked()), encode(decode_checked(), compress_text=True), SCHEMA_1]
"""One payload of each readable format."""
TELLING = [b"\x00", b"\xff", b"\x7f\xff", b"\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff", b"\xdf", b"\xc0", b"\xc7", b"\x90"]
"""Bytes that are likely to matter as a length, a type or a sign."""


def damaged(payload: bytes, draw: random.Random) -> bytes:
    content = bytearray(payload)
    for _ in range(draw.choice((1, 1, 2, 8))):
        at = draw.randrange(len(content) + 1)
        kind = draw.randrange(5)
        if kind == 0:
            content[at : at + 1] = bytes([draw.randrange(256)])
        elif kind == 1 and at < len(content):
            content[at] ^= 1 << draw.randrange(8)
        elif kind == 2:
            lie = draw.choice(TELLING)
            content[at : at + len(lie)] = lie
        elif kind == 3:
            other = draw.choice(SOUND)
            start = draw.randrange(len(other))
            content[at : at + draw.choice((0, 8, 64))] = other[start : start + draw.randrange(64)]
        elif draw.random() < 0.3:
            del content[at:]
    return bytes(content)


def anything(draw: random.Random, depth: int = 0) -> object:
    """Return a random value that msgpack can hold."""
    kind = draw.randrange(9 if depth < 5 else 7)
    if kind < 7:
        return draw.choice(
            (None, True, draw.randrange(-5, 300), 2**63, -(2**63), 0.5, float("nan"), "ok", "", "é", b"", b"\x01" * 8)
        )
    items = [anything(draw, depth + 1) for _ in range(draw.randrange(8))]
    return items if kind == 7 else {draw.choice(("a", "b", "")): item for item in items}


def with_another_node(value: object, draw: random.Random) -> object:
    """Return the same records with one of them replaced."""
    if not isinstance(value, list) or not value or draw.random() < 0.15:
        return anything(draw)
    position = draw.randrange(len(value))
    return [*value[:position], with_another_node(value[position], draw), *value[position + 1 :]]


def records_of(payload: bytes) -> tuple[int, list[object]]:
    (count,) = struct.unpack_from("<I", payload, HEADER.size)
    return count, msgpack.unpackb(payload[HEADER.size + 4 + 9 * count :])


def hostile(draw: random.Random) -> bytes:
    kind = draw.randrange(10)
    if kind == 0:
        return damaged(draw.choice(SOUND), draw)  # the envelope itself
    if kind < 6:
        original = draw.choice(SOUND)
        _, schema, codec, *_ = HEADER.unpack_from(original)
        return sealed(damaged(original[HEADER.size :], draw), schema=schema, codec=codec)
    count, records = records_of(SOUND[0])
    if kind < 9:
        packed = msgpack.packb(with_another_node(records, draw))
        columns = SOUND[0][HEADER.size : HEADER.size + 4 + 9 * count]
        return sealed(columns + (zstandard.compress(packed) if kind == 8 else packed), codec=int(kind == 8))
    return sealed(body(anything(draw), count=draw.randrange(4)))


def survives(payload: bytes) -> bool:
    """Return whether it was decoded; then it must be a valid group."""
    try:
        group = decode(payload)
    except BadPayload:
        return False
    problem = problem_with(group, vocab_size=1000)
    assert problem is None or problem
    assert plain(decode(encode(group))) == plain(group)
    return True


def test_damaged_payloads_are_refused_or_read_and_nothing_else_happens():
    draw = random.Random(seed := random.randrange(2**32))
    print(f"seed {seed}", file=sys.stderr)
    assert all(map(survives, SOUND))
    tracemalloc.start()
    read = early = 0
    for number in range(ROUNDS):
        read += survives(hostile(draw))
        if number == ROUNDS // 10:
            gc.collect()
            early, _ = tracemalloc.get_traced_memory()
    gc.collect()
    late, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert late - early < GROWTH_BYTES, "what was refused is still in memory"
    assert peak < PEAK_BYTES
    assert ROUNDS // 20 < read < ROUNDS * 19 // 20, f"{read} of {ROUNDS} were read: the damage misses one side"
