"""Messages between the processes of one worker, as msgpack of listed types, never pickle."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from typing import Any

import msgpack
import numpy as np

from async_rl.protocols import GenerationArgs
from async_rl.types import Completion, StopReason, VersionSpan
from rollout_workers.inference.engine_core import EngineMetrics
from rollout_workers.inference.generation import Sampling

# -- the worker and rank 0 ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Generate:
    id: int
    prompt: Sequence[int]
    args: GenerationArgs


@dataclass(frozen=True, slots=True, kw_only=True)
class Swap:
    """Load the weights from the shared memory as `version`."""

    id: int
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelRequest:
    """Cancel a request. It is not answered."""

    id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReady:
    kernel: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestDone:
    id: int
    completion: Completion | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    id: int
    kind: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """Why rank 0 ends; its last message."""

    kind: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsReport:
    metrics: EngineMetrics


# -- rank 0 and the others ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    id: int
    prompt: Sequence[int]
    sampling: Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOrder:
    state: int
    """Checksum of the state that every rank must have before the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsLoaded:
    """A rank has read the shared memory."""


# -- on the way ---------------------------------------------------------------------------------------------------------

_KINDS: tuple[type[Any], ...] = (
    Generate, Swap, CancelRequest, EngineReady, RequestDone, Refusal, Broken, MetricsReport, Submit, StepOrder, WeightsLoaded,
    GenerationArgs, Completion, VersionSpan, StopReason, EngineMetrics, Sampling, frozenset,
)  # fmt: skip
_CODES: Mapping[type, int] = {kind: code for code, kind in enumerate(_KINDS)}
_ARRAY = 127
_LENGTH = struct.Struct("<I")


def frame(message: object) -> bytes:
    """Encode a message with its length."""
    body = _pack(message)
    return _LENGTH.pack(len(body)) + body


async def receive(reader: asyncio.StreamReader) -> Any:
    """Read the next message; None once the peer has closed."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        return _unpack(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


class SocketPipe:
    """Blocking send and receive, for threads."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def send(self, message: object) -> None:
        self._end.sendall(frame(message))

    def receive(self) -> Any:
        head = self._end.recv(_LENGTH.size, socket.MSG_WAITALL)
        if len(head) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack(head)
        body = self._end.recv(length, socket.MSG_WAITALL)
        return _unpack(body) if len(body) == length else None


def _pack(value: object) -> bytes:
    return msgpack.packb(value, default=_extension, strict_types=True)  # pyright: ignore[reportReturnType]


def _unpack(body: bytes) -> Any:
    return msgpack.unpackb(body, ext_hook=_rebuild, use_list=False)


def _extension(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)  # pyright: ignore[reportUnknownArgumentType]
    if isinstance(value, np.ndarray):
        return msgpack.ExtType(_ARRAY, _pack([value.dtype.str, value.tobytes()]))
    return msgpack.ExtType(_CODES[type(value)], _pack(_inside(value)))


def _inside(value: Any) -> list[Any]:
    if isinstance(value, Enum):
        return [value.value]
    if isinstance(value, frozenset):
        return [list(value)]  # pyright: ignore[reportUnknownArgumentType]
    return [getattr(value, field.name) for field in fields(value)]


def _rebuild(code: int, body: bytes) -> Any:
    inside = _unpack(body)
    if code == _ARRAY:
        return np.frombuffer(inside[1], dtype=inside[0])
    kind = _KINDS[code]
    if not is_dataclass(kind):
        return kind(*inside)
    return kind(**{field.name: own for field, own in zip(fields(kind), inside, strict=True)})
