"""Where a learner's packed versions can be read, as workers see it: two notes on the board, written by rank 0.

    packed    the learner's fence and host; for each version the addresses of its parcels and the digests of their chunks
    layout    which bytes of which parameters each parcel holds; constant for a learner's life

A note whose fence is not the current one in Redis is ignored: it was written by a learner that was replaced.
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
from async_rl.transport.delta.parcel_delta import Encoding
from async_rl.transport.plan import WireLayout

PACKED_NOTE, LAYOUT_NOTE = "packed", "layout"

NOTES_EXPIRE_S = 4 * 3600.0
"""Lifetime of the notes in Redis. A learner writes them with every version, and again after a quarter of this time."""

MAX_NOTE_BYTES = 1 << 30
"""Limit for the decompressed text of a note. The layout of the largest models takes tens of megabytes."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedParcel:
    """One rank's parcel of one version."""

    chunks: tuple[str, ...]
    """Digest of each chunk."""
    address: str
    """Under which processes of the same machine open its memory; empty: they cannot."""
    url: str
    """HTTP address to pull it from (wire/http.py). It contains a secret: knowing it is enough to read the weights."""
    gpu: str = ""
    """UUID of the GPU that it lies on; empty: host memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _PackedNote:
    fence: int
    host: str
    """`wire.host`: the learner's address."""
    layout: str
    """Digest of the layout note."""
    deltas: Encoding
    versions: Mapping[int, tuple[PackedParcel, ...]]
    """For each version its parcels, in the layout's order."""


_NOTES = TypeAdapter(_PackedNote)


@dataclass(frozen=True, kw_only=True)
class PackedSource:
    """A learner and the versions that it has packed."""

    fence: int
    host: str
    layout: WireLayout
    deltas: Encoding
    """Encoding of the deltas that it sends."""
    versions: Mapping[int, tuple[PackedParcel, ...]]


async def write_layout(board: Board, layout: WireLayout, *, fence: int) -> None:
    await _write(board, LAYOUT_NOTE, layout.to_json, fence)


async def write_source(board: Board, source: PackedSource) -> None:
    """Replace the `packed` note. Call `write_layout` first."""
    note = _PackedNote(
        fence=source.fence,
        host=source.host,
        layout=source.layout.digest,
        deltas=source.deltas,
        versions=source.versions,
    )
    await _write(board, PACKED_NOTE, lambda: _NOTES.dump_json(note), source.fence)


async def _write(board: Board, name: str, text: Callable[[], bytes], fence: int) -> None:
    # A layout repeats the same names, so it compresses well.
    shrunk = await in_daemon_thread(lambda: zlib.compress(text(), level=1), name="weight-note")
    await board.write_note(name, shrunk, NOTES_EXPIRE_S, fence=fence)


async def read_source(board: Board, known: WireLayout | None = None) -> PackedSource | None:
    """The packed versions of the run's current or last learner; None without a learner or without readable notes.

    `known`: a layout read before; used when its digest still matches.
    """
    fence, text = await board.fence(), await board.note(PACKED_NOTE)
    if fence is None or text is None:
        return None
    try:
        note = await in_daemon_thread(lambda: _NOTES.validate_json(_decompress(text)), name="weight-note")
        if note.fence != fence:  # written by a replaced learner; the current one has not packed anything yet
            return None
        layout = known if known is not None and known.digest == note.layout else await _read_layout(board, note.layout)
    except (WireError, ValidationError) as error:
        _log.warning("ignored an unreadable note about the learner's packed weights", problem=str(error).partition("\n")[0])
        return None
    return PackedSource(fence=note.fence, host=note.host, layout=layout, deltas=note.deltas, versions=note.versions)


async def _read_layout(board: Board, digest: str) -> WireLayout:
    text = await board.note(LAYOUT_NOTE)
    if text is None:
        raise WireError("the layout note is missing")
    layout = await in_daemon_thread(lambda: WireLayout.from_json(_decompress(text)), name="weight-note")
    if layout.digest != digest:
        raise WireError("the layout note is another learner's")
    return layout


def _decompress(text: bytes) -> bytes:
    unpacking = zlib.decompressobj()
    try:
        grown = unpacking.decompress(text, MAX_NOTE_BYTES)
    except zlib.error as error:
        raise WireError(f"the note is damaged ({error})") from error
    if not unpacking.eof:
        raise WireError(f"the note is incomplete, or longer than {MAX_NOTE_BYTES} bytes")
    return grown
