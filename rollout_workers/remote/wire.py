"""Messages between a worker and an environment server: msgpack of plain data, checked when read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, cast

import msgpack  # pyright: ignore[reportMissingTypeStubs]
import numpy as np
from pydantic import TypeAdapter, ValidationError

from async_rl.protocols import GenerationArgs, Prompt, Returns
from async_rl.types import Completion, Failure, Message, Rollout, Sample, Status, StopReason, Task, Ticket, VersionSpan

SCHEMA = 1
"""Version of the protocol. Increase it with every change that is not compatible."""
MAX_BYTES = 256 * 2**20
"""Maximum size of one message."""

_TASK, _TICKET, _ARGS = TypeAdapter(Task), TypeAdapter(Ticket), TypeAdapter(GenerationArgs)
_MESSAGES, _FAILURE = TypeAdapter(tuple[Message, ...]), TypeAdapter(Failure | None)
_NUMBERS, _IDS = TypeAdapter(dict[str, float]), TypeAdapter(list[int])

WireMap = Mapping[str, Any]


class MalformedMessage(ValueError):
    """The peer sent an invalid message."""


def pack(message: WireMap) -> bytes:
    return cast("Any", msgpack).packb(message)


def unpack(message: bytes) -> dict[str, Any]:
    try:
        found = cast("Any", msgpack).unpackb(message, strict_map_key=True, max_ext_len=0)
    except (ValueError, msgpack.UnpackException) as error:
        raise MalformedMessage(f"a message of {len(message)} bytes is not msgpack") from error
    if not isinstance(found, dict):
        raise MalformedMessage(f"a message is a {type(found).__name__} and should be a map")
    return cast("dict[str, Any]", found)


def read(adapter: TypeAdapter[Any], value: Any) -> Any:
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        wrong = error.errors(include_url=False, include_input=False)[0]
        raise MalformedMessage(f"{'.'.join(map(str, wrong['loc']))}: {wrong['msg']}") from error


# -- tasks and tickets ----------------------------------------------------------------------------------------------
def write_task(task: Task) -> WireMap:
    return asdict(task)


def read_task(value: Any) -> Task:
    return read(_TASK, value)


def write_ticket(ticket: Ticket) -> WireMap:
    return asdict(ticket)


def read_ticket(value: Any) -> Ticket:
    return read(_TICKET, value)


# -- generations ----------------------------------------------------------------------------------------------------
def write_prompt(prompt: Prompt) -> WireMap:
    if isinstance(prompt, str):
        return {"text": prompt}
    messages = [part for part in prompt if isinstance(part, Message)]
    return {"messages": [asdict(message) for message in messages]} if messages else {"ids": list(map(int, cast("Any", prompt)))}


def read_prompt(value: Any) -> Prompt:
    match value:
        case {"text": str() as text}:
            return text
        case {"messages": messages}:
            return read(_MESSAGES, messages)
        case {"ids": ids}:
            return read(_IDS, ids)
        case _:
            raise MalformedMessage("a prompt is a text, messages or token ids")


def read_returns(value: Any) -> Returns:
    """An empty one, or one of another kind, means text."""
    return value if value in ("tokens", "logprobs") else "text"


def write_args(args: GenerationArgs) -> WireMap:
    return asdict(args)


def read_args(value: Any) -> GenerationArgs:
    return read(_ARGS, value)


def write_completion(completion: Completion) -> WireMap:
    return {
        "token_ids": _bytes(completion.token_ids, "<i4"),
        "logprobs": _bytes(completion.logprobs, "<f4"),
        "versions": _write_spans(completion.versions),
        "stop_reason": completion.stop_reason.value,
        "text": completion.text,
    }


def read_completion(value: Any) -> Completion:
    match value:
        case {"token_ids": ids, "logprobs": logprobs, "versions": spans, "stop_reason": reason, "text": str() as text}:
            return Completion(
                token_ids=_array(ids, "<i4"),
                logprobs=_array(logprobs, "<f4"),
                versions=_read_spans(spans),
                stop_reason=_choice(StopReason, reason),
                text=text,
            )
        case _:
            raise MalformedMessage("a completion lacks fields or has wrong ones")


# -- rollouts -------------------------------------------------------------------------------------------------------
def write_rollout(rollout: Rollout) -> WireMap:
    return {
        "samples": [_write_sample(sample) for sample in rollout.samples],
        "reward": rollout.reward,
        "status": rollout.status.value,
        "failure": None if rollout.failure is None else asdict(rollout.failure),
        "reward_parts": dict(rollout.reward_parts),
        "metrics": dict(rollout.metrics),
        "conversation": [asdict(message) for message in rollout.conversation],
    }


def read_rollout(value: Any) -> Rollout:
    match value:
        case {"samples": list() as samples, "reward": float() | int() as reward, "status": status, **rest}:
            return Rollout(
                samples=tuple(map(_read_sample, cast("Sequence[Any]", samples))),
                reward=reward,
                status=_choice(Status, status),
                failure=read(_FAILURE, rest.get("failure")),
                reward_parts=read(_NUMBERS, rest.get("reward_parts")),
                metrics=read(_NUMBERS, rest.get("metrics")),
                conversation=read(_MESSAGES, rest.get("conversation")),
            )
        case _:
            raise MalformedMessage("a rollout lacks fields or has wrong ones")


def _write_sample(sample: Sample) -> WireMap:
    return {
        "token_ids": _bytes(sample.token_ids, "<i4"),
        "loss_mask": _bytes(sample.loss_mask, "u1"),
        "logprobs": _bytes(sample.logprobs, "<f4"),
        "versions": _write_spans(sample.versions),
    }


def _read_sample(value: Any) -> Sample:
    match value:
        case {"token_ids": ids, "loss_mask": mask, "logprobs": logprobs, "versions": spans}:
            return Sample(
                token_ids=_array(ids, "<i4"),
                loss_mask=_array(mask, "u1"),
                logprobs=_array(logprobs, "<f4"),
                versions=_read_spans(spans),
            )
        case _:
            raise MalformedMessage("a sample lacks fields or has wrong ones")


def _write_spans(spans: Sequence[VersionSpan]) -> list[tuple[int, int, int]]:
    return [(span.version, span.start, span.stop) for span in spans]


def _read_spans(value: Any) -> tuple[VersionSpan, ...]:
    try:
        return tuple(VersionSpan(version=int(version), start=int(start), stop=int(stop)) for version, start, stop in value)
    except (TypeError, ValueError) as error:
        raise MalformedMessage("version spans are triples of numbers") from error


def _bytes(array: np.ndarray, kind: str) -> bytes:
    return np.ascontiguousarray(array, np.dtype(kind)).tobytes()


def _array(value: Any, kind: str) -> Any:
    if not isinstance(value, bytes) or len(value) % np.dtype(kind).itemsize:
        raise MalformedMessage(f"an array of {kind} must be bytes of a multiple of its size")
    return np.frombuffer(value, np.dtype(kind))


def _choice(kind: type[Any], value: Any) -> Any:
    try:
        return kind(value)
    except ValueError as error:
        raise MalformedMessage(f"{value!r} is no {kind.__name__}") from error
