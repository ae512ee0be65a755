"""What a learner has packed, as whoever takes it sees it: two notes on the board, written by rank 0 alone.

    packed    which learner this is, and of each version: where the parcels lie, and the digests of their chunks
    layout    which bytes of which parameters each parcel holds: the same for a learner's life

Only the buffer says who the learner is: a note with another fence than that in Redis is nobody's.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import structlog
from pydantic import TypeAdapter, ValidationError

from async_rl.errors import WireError
from async_rl.protocols import Board
from async_rl.supervision.liveness.daemon_thread import in_daemon_thread
from async_rl.transport.plan import WireLayout

PACKED_NOTE, LAYOUT_NOTE = "packed", "layout"

NOTES_EXPIRE_S = 4 * 3600.0
"""After they were written last. A learner writes them with every version, and again when a quarter of this has passed."""

MOST_BYTES = 1 << 30
"""Of a note's text. The layout of the largest models takes tens of megabytes."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedParcel:
    """One rank's parcel of one version."""

    chunks: tuple[str, ...]
    """The digest of each."""
    address: str
    """Where processes of the same machine find its memory; empty when nowhere."""
    url: str
    """Where it can be pulled from (wire/http.py). Whoever knows this can read the weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Note:
    fence: int
    host: str
    """`wire.host`: the learner's address."""
    layout: str
    """Its digest."""
    versions: Mapping[int, tuple[PackedParcel, ...]]
    """By version, the parcels in the layout's order."""


_NOTES = TypeAdapter(_Note)


@dataclass(frozen=True, kw_only=True)
class PackedSource:
    """A learner that has packed versions."""

    fence: int
    host: str
    layout: WireLayout
    versions: Mapping[int, tuple[PackedParcel, ...]]


async def write_layout(board: Board, layout: WireLayout, *, fence: int) -> None:
    await _write(board, LAYOUT_NOTE, layout.to_json, fence)


async def write_source(board: Board, source: PackedSource) -> None:
    """After `write_layout`. Takes the place of what was written before."""
    note = _Note(fence=source.fence, host=source.host, layout=source.layout.digest, versions=source.versions)
    await _write(board, PACKED_NOTE, lambda: _NOTES.dump_json(note), source.fence)


async def _write(board: Board, name: str, text: Callable[[], bytes], fence: int) -> None:
    shrunk = await in_daemon_thread(lambda: _shrunk(text()), name="weight-note")
    await board.write_note(name, shrunk, NOTES_EXPIRE_S, fence=fence)


async def read_source(board: Board, known: WireLayout | None = None) -> PackedSource | None:
    """The learner that holds the run, or held it last. None where there is none, or nothing that can be read.

    `known`: a layout that need not be read again.
    """
    fence, text = await board.fence(), await board.note(PACKED_NOTE)
    if fence is None or text is None:
        return None
    try:
        note = await in_daemon_thread(lambda: _NOTES.validate_json(_grown(text)), name="weight-note")
        if note.fence != fence:  # another learner has the run by now, and has not packed anything yet
            return None
        layout = known if known is not None and known.digest == note.layout else await _read_layout(board, note.layout)
    except (WireError, ValidationError) as error:
        _log.warning("ignored what was written about the learner's weights", problem=str(error).partition("\n")[0])
        return None
    return PackedSource(fence=note.fence, host=note.host, layout=layout, versions=note.versions)


async def _read_layout(board: Board, digest: str) -> WireLayout:
    text = await board.note(LAYOUT_NOTE)
    if text is None:
        raise WireError("there is no layout")
    layout = await in_daemon_thread(lambda: WireLayout.from_json(_grown(text)), name="weight-note")
    if layout.digest != digest:
        raise WireError("the layout is another learner's")
    return layout


def _shrunk(text: bytes) -> bytes:
    """The names in a list repeat themselves."""
    return zlib.compress(text, level=1)


def _grown(text: bytes) -> bytes:
    unpacking = zlib.decompressobj()
    try:
        grown = unpacking.decompress(text, MOST_BYTES)
    except zlib.error as error:
        raise WireError(f"it is damaged ({error})") from error
    if not unpacking.eof:
        raise WireError("it is incomplete, or longer than it may be")
    return grown
