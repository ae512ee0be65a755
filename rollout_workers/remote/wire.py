"""Messages between a worker and an environment server: msgpack of plain data, checked when read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Annotated, Any, Literal, TypeVar, cast, get_type_hints

import msgpack  # pyright: ignore[reportMissingTypeStubs]
import numpy as np
from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, TypeAdapter, ValidationError, create_model

from async_rl.config.rollout import TimeoutsConfig
from async_rl.protocols import GenerationArgs, Prompt, Returns
from async_rl.types import Completion, Message, Rollout, Sample, Task, Ticket, VersionSpan

SCHEMA = 1
"""Version of the protocol. Increase it with every change that is not compatible."""
MAX_BYTES = 256 * 2**20
"""Maximum size of one message."""
HEARTBEAT_S = 15.0
"""A dead peer is noticed within twice this time."""

WireMap = Mapping[str, Any]
Value = TypeVar("Value")


class MalformedMessage(ValueError):
    """The peer sent an invalid message."""


# -- messages ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class OrderedEpisode:
    ticket: Ticket
    sibling: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderedModel:
    mark: Annotated[Returns, BeforeValidator(lambda mark: mark if mark in ("tokens", "logprobs") else "text")]
    tokenizer: WireMap


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeOrder:
    """Play a task: the first message of a worker."""

    schema: Literal[1] = SCHEMA
    name: str
    """Name of the environment in the run."""
    seed: int
    task: Task
    contexts: Annotated[tuple[OrderedEpisode, ...], Field(min_length=1)]
    models: dict[str, OrderedModel]
    """The trained model under the empty name, and the policies."""
    timeouts: TimeoutsConfig


# -- writing ----------------------------------------------------------------------------------------------------------
_ARRAYS = {"token_ids": "<i4", "loss_mask": "u1", "logprobs": "<f4"}
"""Fields that are arrays, which travel as bytes, and the types of their items."""


def pack(message: object) -> bytes:
    return cast("Any", msgpack).packb(message, default=_plain)


def _plain(value: Any) -> Any:
    """Convert a value that msgpack does not know."""
    match value:
        case VersionSpan():
            return value.version, value.start, value.stop
        case BaseModel():
            return value.model_dump()
        case Mapping():
            return dict(cast("Mapping[str, Any]", value))
        case _:
            return {field.name: _field(field.name, getattr(value, field.name)) for field in fields(value)}


def _field(name: str, value: Any) -> Any:
    return np.ascontiguousarray(value, _ARRAYS[name]).tobytes() if name in _ARRAYS else value


def write_prompt(prompt: Prompt) -> WireMap:
    if isinstance(prompt, str):
        return {"text": prompt}
    messages = [part for part in prompt if isinstance(part, Message)]
    return {"messages": messages} if messages else {"ids": list(map(int, cast("Any", prompt)))}


# -- reading ----------------------------------------------------------------------------------------------------------
def unpack(message: bytes) -> dict[str, Any]:
    try:
        found = cast("Any", msgpack).unpackb(message, strict_map_key=True, max_ext_len=0)
    except (ValueError, msgpack.UnpackException) as error:
        raise MalformedMessage(f"a message of {len(message)} bytes is not msgpack") from error
    if not isinstance(found, dict):
        raise MalformedMessage(f"a message is a {type(found).__name__} and should be a map")
    return cast("dict[str, Any]", found)


def read(adapter: TypeAdapter[Value], value: object) -> Value:
    """Check a part of a message. Raises MalformedMessage that names the wrong field."""
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        wrong = error.errors(include_url=False, include_input=False)[0]
        raise MalformedMessage(f"{'.'.join(map(str, wrong['loc']))}: {wrong['msg']}") from error


def _with_arrays(kind: type, **others: Any) -> Any:
    """The type of a dataclass with arrays or spans for pydantic, which does not know arrays."""
    own = {name: Annotated[bytes, AfterValidator(_array_of(items))] for name, items in _ARRAYS.items()}
    own |= {"versions": tuple[_SPAN, ...], **others}
    defaults = {each.name: each.default for each in fields(kind) if each.default is not MISSING}
    read_as: Any = {name: (own.get(name, hint), defaults.get(name, ...)) for name, hint in get_type_hints(kind).items()}
    shape: Any = create_model(kind.__name__, **read_as)
    return Annotated[shape, AfterValidator(lambda found: kind(**dict(found)))]


def _array_of(items: str) -> Any:
    return lambda data: np.frombuffer(data, items)


def _span(numbers: tuple[int, int, int]) -> VersionSpan:
    version, start, stop = numbers
    return VersionSpan(version=version, start=start, stop=stop)


_SPAN = Annotated[tuple[int, int, int], AfterValidator(_span)]

ORDER, TASK, ARGS = TypeAdapter(EpisodeOrder), TypeAdapter(Task), TypeAdapter(GenerationArgs)
COMPLETION: TypeAdapter[Completion] = TypeAdapter(_with_arrays(Completion))
_SAMPLE = _with_arrays(Sample)
ROLLOUT: TypeAdapter[Rollout] = TypeAdapter(_with_arrays(Rollout, samples=tuple[_SAMPLE, ...]))
_MESSAGES, _IDS = TypeAdapter(tuple[Message, ...]), TypeAdapter(list[int])


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
