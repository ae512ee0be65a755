"""RolloutGroup <-> bytes. Data only: a hostile payload can at worst be refused.

    magic "ARLG" | schema u16 | codec u8 | 0 | length u32 of the body | xxh3 u64 of the body | body

The body is msgpack: records are lists in the order of their fields, arrays are raw little-endian bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NoReturn, TypeVar, cast

import msgpack  # pyright: ignore[reportMissingTypeStubs]
import numpy as np
import numpy.typing as npt
import xxhash

from async_rl.types import Failure, Message, Rollout, RolloutGroup, Sample, Scalar, Status, Task, VersionSpan

MAX_BYTES = 256 * 2**20
"""Of one payload; a larger one is refused unread."""

_HEADER = struct.Struct("<4sHBxIQ")
_MAGIC = b"ARLG"
_SCHEMA = 1
_MSGPACK = 0

_TOKEN_IDS = np.dtype("<i4")
_LOSS_MASK = np.dtype("u1")
_LOGPROBS = np.dtype("<f4")

_pack = cast("Callable[[object], bytes]", cast("Any", msgpack).packb)
_unpack = cast("Callable[[memoryview], object]", partial(cast("Any", msgpack).unpackb, strict_map_key=True))

T = TypeVar("T")
Scalars = TypeVar("Scalars", bound=np.generic)


class BadPayload(Exception):
    """These bytes are no group; the message says why, without quoting them."""


def encode(group: RolloutGroup) -> bytes:
    body = _pack(_write_group(group))
    if len(body) + _HEADER.size > MAX_BYTES:
        raise BadPayload(f"a group of {len(body)} bytes is above the limit of {MAX_BYTES}")
    return _HEADER.pack(_MAGIC, _SCHEMA, _MSGPACK, len(body), xxhash.xxh3_64_intdigest(body)) + body


def decode(payload: bytes) -> RolloutGroup:
    """Its arrays are read-only views into the payload."""
    if not _HEADER.size <= len(payload) <= MAX_BYTES:
        raise BadPayload(f"a payload has between {_HEADER.size} and {MAX_BYTES} bytes, this one has {len(payload)}")
    magic, schema, codec, length, checksum = _HEADER.unpack_from(payload)
    body = memoryview(payload)[_HEADER.size :]
    if magic != _MAGIC:
        raise BadPayload("it does not begin like a group")
    if schema not in _READERS:
        raise BadPayload(f"schema {schema} is unknown to this version, which reads {sorted(_READERS)}")
    if codec != _MSGPACK:
        raise BadPayload(f"codec {codec} is unknown")
    if length != len(body):
        raise BadPayload(f"the body should have {length} bytes and has {len(body)}")
    if checksum != xxhash.xxh3_64_intdigest(body):
        raise BadPayload("the checksum does not match")
    try:
        return _READERS[schema](_unpack(body))
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException) as error:
        raise BadPayload(f"the body is malformed: {type(error).__name__}") from error


# -- writing --------------------------------------------------------------------------------------------------------
def _write_group(group: RolloutGroup) -> list[Any]:
    task = group.task
    prompt = task.prompt if isinstance(task.prompt, str) else _write_conversation(task.prompt)
    return [
        group.id,
        [task.key, task.environment, prompt, task.answer, dict(task.data)],
        [_write_rollout(rollout) for rollout in group.rollouts],
        group.worker,
    ]


def _write_rollout(rollout: Rollout) -> list[Any]:
    failure = rollout.failure
    return [
        [_write_sample(sample) for sample in rollout.samples],
        float(rollout.reward),
        rollout.status.value,
        None if failure is None else [failure.boundary, failure.kind, failure.message],
        {name: float(value) for name, value in rollout.reward_parts.items()},
        {name: float(value) for name, value in rollout.metrics.items()},
        _write_conversation(rollout.conversation),
    ]


def _write_sample(sample: Sample) -> list[Any]:
    return [
        sample.token_ids.astype(_TOKEN_IDS, copy=False).tobytes(),
        sample.loss_mask.astype(_LOSS_MASK, copy=False).tobytes(),
        sample.logprobs.astype(_LOGPROBS, copy=False).tobytes(),
        [number for span in sample.versions for number in (span.version, span.start, span.stop)],
    ]


def _write_conversation(messages: tuple[Message, ...]) -> list[list[str]]:
    return [[message.role, message.content] for message in messages]


# -- reading: every field is checked, because a checksum only proves that nothing changed on the way ----------------
def _read_group(value: object) -> RolloutGroup:
    group_id, task, rollouts, worker = _record(value, 4, "group")
    return RolloutGroup(
        id=_text(group_id), task=_read_task(task), rollouts=_each(_read_rollout, rollouts, "rollouts"), worker=_text(worker)
    )


def _read_task(value: object) -> Task:
    key, environment, prompt, answer, data = _record(value, 5, "task")
    return Task(
        key=_text(key),
        environment=_text(environment),
        prompt=prompt if isinstance(prompt, str) else _each(_read_message, prompt, "prompt"),
        answer=_text(answer),
        data=_mapping(_scalar, data, "data"),
    )


def _read_rollout(value: object) -> Rollout:
    samples, reward, status, failure, reward_parts, metrics, conversation = _record(value, 7, "rollout")
    return Rollout(
        samples=_each(_read_sample, samples, "samples"),
        reward=_number(reward),
        status=Status(_text(status)),
        failure=None if failure is None else _read_failure(failure),
        reward_parts=_mapping(_number, reward_parts, "reward parts"),
        metrics=_mapping(_number, metrics, "metrics"),
        conversation=_each(_read_message, conversation, "conversation"),
    )


def _read_failure(value: object) -> Failure:
    boundary, kind, message = _record(value, 3, "failure")
    return Failure(boundary=_text(boundary), kind=_text(kind), message=_text(message))


def _read_sample(value: object) -> Sample:
    token_ids, loss_mask, logprobs, spans = _record(value, 4, "sample")
    return Sample(
        token_ids=_array(token_ids, _TOKEN_IDS),
        loss_mask=_array(loss_mask, _LOSS_MASK),
        logprobs=_array(logprobs, _LOGPROBS),
        versions=_read_spans(spans),
    )


def _read_spans(value: object) -> tuple[VersionSpan, ...]:
    numbers = _each(_integer, value, "spans")
    if len(numbers) % 3:
        _refuse("the version spans are incomplete")
    triples = zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True)
    return tuple(VersionSpan(version=version, start=start, stop=stop) for version, start, stop in triples)


def _read_message(value: object) -> Message:
    role, content = _record(value, 2, "message")
    return Message(role=_text(role), content=_text(content))


def _record(value: object, length: int, what: str) -> list[object]:
    if not isinstance(value, list) or len(cast("list[object]", value)) != length:
        _refuse(f"a {what} is a list of {length}")
    return cast("list[object]", value)


def _each(read: Callable[[object], T], value: object, what: str) -> tuple[T, ...]:
    if not isinstance(value, list):
        _refuse(f"{what} are a list")
    return tuple([read(element) for element in cast("list[object]", value)])


def _mapping(read: Callable[[object], T], value: object, what: str) -> Mapping[str, T]:
    if not isinstance(value, dict):
        _refuse(f"{what} are a map")
    return {_text(key): read(element) for key, element in cast("dict[object, object]", value).items()}


def _text(value: object) -> str:
    return value if isinstance(value, str) else _refuse("a text is missing")


def _integer(value: object) -> int:
    return value if type(value) is int else _refuse("a whole number is missing")


def _number(value: object) -> float:
    return value if type(value) is float else _refuse("a number is missing")


def _scalar(value: object) -> Scalar:
    return value if isinstance(value, str | int | float) else _refuse("a scalar is missing")


def _array(value: object, dtype: np.dtype[Scalars]) -> npt.NDArray[Scalars]:
    return np.frombuffer(value, dtype) if isinstance(value, bytes) else _refuse("an array is missing")


def _refuse(reason: str) -> NoReturn:
    raise BadPayload(reason)


_READERS: Mapping[int, Callable[[object], RolloutGroup]] = {1: _read_group}
"""By schema. The previous schema stays readable for one release, so that a run can be upgraded while it goes on."""
