"""Converts a group's fields to and from nested lists for msgpack: a record is the list of its fields in order.

Every field is checked on reading, because a checksum only proves that nothing changed in transit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import NoneType
from typing import Any, TypeAlias, cast

from async_rl.types import (
    EpisodeSpan,
    Failure,
    GroupTimes,
    Message,
    Rollout,
    RolloutGroup,
    Sample,
    Scalar,
    Status,
    Task,
    ToolCall,
    VersionSpan,
)

MAX_ITEMS = 2**14
"""Limit of one list: msgpack allocates the length that a list announces, at every level of nesting."""

MsgpackValue: TypeAlias = "bool | int | float | str | bytes | list[MsgpackValue] | dict[MsgpackValue, MsgpackValue] | None"
"""Any value that msgpack can unpack."""

_STAGES = ("task", "queue", "inference", "environment", "reward")
"""Stages of spans, by the number that stands for them."""
_STAGE_NUMBERS = {stage: number for number, stage in enumerate(_STAGES)}
_SPAN_FIELDS = 6
_FIELDS_WITHOUT_TIMES = 4
_STATUSES = {status.value: status for status in Status}


class BadPayload(Exception):
    """Bytes that are not a valid group, or a group that cannot be encoded. The message quotes neither."""


# -- writing --------------------------------------------------------------------------------------------------------
def write_group(group: RolloutGroup) -> list[Any]:
    task = group.task
    prompt = task.prompt if isinstance(task.prompt, str) else _write_conversation(task.prompt)
    return [
        group.id,
        [task.key, task.environment, prompt, task.answer, dict(task.data)],
        _bounded([_write_rollout(rollout) for rollout in group.rollouts]),
        group.worker,
        *([] if group.times is None else [_write_times(group.times)]),
    ]


def _write_times(times: GroupTimes) -> list[Any]:
    """Return the times with the spans' numbers in a row, in milliseconds; spans beyond the limit of a list are left out."""
    numbers = [
        number
        for stage, sibling, start_s, stop_s, oldest, newest in times.spans[: MAX_ITEMS // _SPAN_FIELDS]
        for number in (_STAGE_NUMBERS[stage], sibling, int(start_s * 1000), int(stop_s * 1000), oldest, newest)
    ]
    return [float(times.reserved_at), float(times.seconds), numbers]


def _write_rollout(rollout: Rollout) -> list[Any]:
    failure = rollout.failure
    return [
        _bounded([_write_sample(sample) for sample in rollout.samples]),
        float(rollout.reward),
        rollout.status.value,
        None if failure is None else [failure.boundary, failure.kind, failure.message],
        {name: float(value) for name, value in rollout.reward_parts.items()},
        {name: float(value) for name, value in rollout.metrics.items()},
        _write_conversation(rollout.conversation),
    ]


def _write_sample(sample: Sample) -> list[Any]:
    """Return length and version spans; the tokens are in the columns."""
    return [len(sample), _bounded([number for span in sample.versions for number in (span.version, span.start, span.stop)])]


def _write_conversation(messages: tuple[Message, ...]) -> list[Any]:
    return _bounded([_write_message(message) for message in messages])


def _write_message(message: Message) -> list[Any]:
    """Return role and content, followed by tool calls and tool_call_id only if there are any."""
    if not message.tool_calls and not message.tool_call_id:
        return [message.role, message.content]
    calls = _bounded([[call.name, call.arguments, call.id] for call in message.tool_calls])
    return [message.role, message.content, calls, message.tool_call_id]


def _bounded(items: list[Any]) -> list[Any]:
    if len(items) > MAX_ITEMS:
        raise BadPayload(f"a list of {len(items)} is above the limit of {MAX_ITEMS}")
    return items


# -- reading --------------------------------------------------------------------------------------------------------
def read_fields(value: MsgpackValue, what: str, *kinds: type | tuple[type, ...]) -> list[Any]:
    """Return the fields of a record, one of each kind. Raises BadPayload."""
    if isinstance(value, list) and len(value) == len(kinds) and all(map(isinstance, value, kinds)):
        return value
    raise BadPayload(f"{what} has malformed fields")


def read_group(value: MsgpackValue, read_sample: Callable[[MsgpackValue], Sample]) -> RolloutGroup:
    fields = [*value, []] if isinstance(value, list) and len(value) == _FIELDS_WITHOUT_TIMES else value
    group_id, task, rollouts, worker, times = read_fields(fields, "the group", str, list, list, str, list)
    return RolloutGroup(
        id=group_id,
        task=_read_task(task),
        rollouts=tuple([_read_rollout(rollout, read_sample) for rollout in rollouts]),
        worker=worker,
        times=_read_times(times) if times else None,
    )


def _read_times(value: MsgpackValue) -> GroupTimes:
    reserved_at, seconds, numbers = read_fields(value, "the times of the group", float, float, list)
    if len(numbers) % _SPAN_FIELDS or any(type(number) is not int for number in numbers):
        raise BadPayload("the spans of the group are not rows of integers")
    if not (math.isfinite(reserved_at) and math.isfinite(seconds)):
        raise BadPayload("the times of the group are not finite")
    rest = iter(numbers)
    spans = [
        EpisodeSpan(_STAGES[stage % len(_STAGES)], sibling, start / 1000, stop / 1000, oldest, newest)
        for stage, sibling, start, stop, oldest, newest in zip(*[rest] * _SPAN_FIELDS, strict=True)
    ]
    return GroupTimes(reserved_at=reserved_at, seconds=seconds, spans=tuple(spans))


def _read_task(value: MsgpackValue) -> Task:
    key, environment, prompt, answer, data = read_fields(value, "the task", str, str, (str, list), str, dict)
    return Task(
        key=key,
        environment=environment,
        prompt=prompt if isinstance(prompt, str) else _read_conversation(prompt),
        answer=answer,
        data=_scalars(data),
    )


def _read_rollout(value: MsgpackValue, read_sample: Callable[[MsgpackValue], Sample]) -> Rollout:
    samples, reward, status, failure, parts, metrics, messages = read_fields(
        value, "a rollout", list, float, str, (list, NoneType), dict, dict, list
    )
    if status not in _STATUSES:
        raise BadPayload("a rollout has a status that is unknown here")
    return Rollout(
        samples=tuple([read_sample(sample) for sample in samples]),
        reward=reward,
        status=_STATUSES[status],
        failure=None if failure is None else _read_failure(failure),
        reward_parts=_numbers(parts),
        metrics=_numbers(metrics),
        conversation=_read_conversation(messages),
    )


def _read_failure(value: MsgpackValue) -> Failure:
    boundary, kind, message = read_fields(value, "a failure", str, str, str)
    return Failure(boundary=boundary, kind=kind, message=message)


def _read_conversation(messages: list[MsgpackValue]) -> tuple[Message, ...]:
    return tuple([_read_message(message) for message in messages])


def _read_message(value: MsgpackValue) -> Message:
    if isinstance(value, list) and len(value) == 2:
        role, content = read_fields(value, "a message", str, str)
        return Message(role=role, content=content)
    role, content, calls, answers = read_fields(value, "a message", str, str, list, str)
    return Message(
        role=role, content=content, tool_calls=tuple([_read_tool_call(call) for call in calls]), tool_call_id=answers
    )


def _read_tool_call(value: MsgpackValue) -> ToolCall:
    name, arguments, call_id = read_fields(value, "a tool call", str, str, str)
    return ToolCall(name=name, arguments=arguments, id=call_id)


def read_spans(numbers: list[MsgpackValue]) -> tuple[VersionSpan, ...]:
    found: list[VersionSpan] = []
    rest = iter(numbers)
    for version, start, stop in zip(rest, rest, rest, strict=True):
        # `type`, because True is an int by inheritance and no position.
        if type(version) is not int or type(start) is not int or type(stop) is not int:
            raise BadPayload("a version span is not three integers")
        found.append(VersionSpan(version=version, start=start, stop=stop))
    return tuple(found)


def _numbers(values: dict[MsgpackValue, MsgpackValue]) -> Mapping[str, float]:
    for name, value in values.items():
        if type(name) is not str or type(value) is not float:
            raise BadPayload("a metric is not a name with a number")
    return cast("dict[str, float]", values)


def _scalars(values: dict[MsgpackValue, MsgpackValue]) -> Mapping[str, Scalar]:
    for name, value in values.items():
        if type(name) is not str or not isinstance(value, str | int | float):
            raise BadPayload("the task's data holds values other than scalars")
    return cast("dict[str, Scalar]", values)
