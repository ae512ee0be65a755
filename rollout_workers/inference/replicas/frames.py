"""Messages between the processes of one worker, as msgpack of listed types, never pickle."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from types import SimpleNamespace
from typing import Any

import msgpack
import numpy as np

from async_rl.protocols import GenerationArgs
from async_rl.types import Completion, StopReason, VersionSpan
from rollout_workers.inference.generation import Sampling
from rollout_workers.inference.rollout_engine import EngineMetrics

# -- the worker and rank 0 ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Generate:
    id: int
    prompt: Sequence[int]
    args: GenerationArgs


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedParcels:
    """Where a version lies (shared_weights.py)."""

    layout: bytes
    """The WireLayout as JSON; empty: that of the version before."""
    addresses: Sequence[str]
    """For each parcel the path under which ranks open its memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadWeights:
    """Serve a version from the worker's memory, which may be overwritten once this is answered."""

    id: int
    version: int
    parcels: SharedParcels


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
class StageWeights:
    """Bring a version to the rank's device, beside decoding; a Swap follows."""

    parcels: SharedParcels


@dataclass(frozen=True, slots=True, kw_only=True)
class Swap:
    """Serve the staged version."""

    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsLoaded:
    """A rank has read the staged version."""


# -- on the way ---------------------------------------------------------------------------------------------------------

_KINDS: tuple[type[Any], ...] = (
    Generate, LoadWeights, SharedParcels, CancelRequest, EngineReady, RequestDone, Refusal, Broken, MetricsReport, Submit,
    StepOrder, StageWeights, Swap, WeightsLoaded, GenerationArgs, Completion, VersionSpan, StopReason, EngineMetrics, Sampling,
    np.ndarray,
)  # fmt: skip
_CODES: Mapping[type, int] = {kind: code for code, kind in enumerate(_KINDS)}
_CHUNK = 1 << 16


def pack(message: object) -> bytes:
    return msgpack.packb(message, default=_extension, strict_types=True)  # pyright: ignore[reportReturnType]


async def messages(reader: asyncio.StreamReader) -> AsyncIterator[Any]:
    """Yield the messages until the peer has closed."""
    unpacker = msgpack.Unpacker(ext_hook=_rebuild, use_list=False)
    with suppress(ConnectionError):
        while data := await reader.read(_CHUNK):
            unpacker.feed(data)
            for message in unpacker:
                yield message


class SocketPipe:
    """Blocking send and receive, for threads."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._unpacker = msgpack.Unpacker(SimpleNamespace(read=end.recv), ext_hook=_rebuild, use_list=False)

    def send(self, message: object) -> None:
        self._end.sendall(pack(message))

    def receive(self) -> Any:
        """The next message; None once the peer has closed."""
        return next(self._unpacker, None)


def _extension(value: Any) -> Any:
    match value:
        case tuple():
            return list(value)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
        case np.ndarray():
            inside = [value.dtype.str, value.tobytes()]
        case Enum():
            inside = [value.value]
        case _:
            inside = [getattr(value, field.name) for field in fields(value)]
    return msgpack.ExtType(_CODES[type(value)], pack(inside))


def _rebuild(code: int, body: bytes) -> Any:
    kind, inside = _KINDS[code], msgpack.unpackb(body, ext_hook=_rebuild, use_list=False)
    if kind is np.ndarray:
        return np.frombuffer(inside[1], dtype=inside[0])
    if is_dataclass(kind):
        return kind(**{field.name: own for field, own in zip(fields(kind), inside, strict=True)})
    return kind(*inside)
