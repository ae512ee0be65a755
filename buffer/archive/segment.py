"""One file of the archive: checksummed records one after the other, and an index that can be rebuilt from them.

docs/archive.md describes the bytes. Reading never fails on damaged content: a record is valid, or damaged, or cut off by the
end of the file.
"""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import xxhash

from async_rl.durable.whole_file import write_whole
from async_rl.errors import ConfigError

FORMAT = 1
MAX_HEAD = 4096
"""Limit of the text before a payload; a header that announces more is not ours."""

_FILE = struct.Struct("<4sHxxIQ")
_FILE_MAGIC = b"ARLS"
_RECORD = struct.Struct("<4sIQQQ")
_RECORD_MAGIC = b"ARLR"
_CHECKSUM = struct.Struct("<Q")
"""Ends both headers: the checksum of all before it and of the text behind it."""
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSummary:
    """What a record says of its group, so that groups can be selected without decoding them."""

    id: str
    step: int
    """The last step that trained it."""
    time: float
    """When it was archived, in seconds since 1970."""
    environment: str
    tokens: int
    """Number of sampled tokens."""
    reward: float | None
    """Mean reward of its rollouts; None if all of them failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentEntry:
    summary: GroupSummary
    offset: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    file: str
    offset: int
    length: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentIndex:
    """What a file holds, in the order of the file."""

    entries: tuple[SegmentEntry, ...]
    damage: tuple[Damage, ...]
    end: int
    """Offset behind the last record; anything beyond is an unfinished record."""


def files_in(folder: Path) -> list[Path]:
    """Return the archive's files, oldest first."""
    found = [path for path in folder.glob("groups-*.arl") if re.fullmatch(r"groups-\d{6,}\.arl", path.name)]
    return sorted(found, key=segment_number)


def segment_number(path: Path) -> int:
    return int(path.stem.removeprefix("groups-"))


def segment_path(folder: Path, number: int) -> Path:
    return folder / f"groups-{number:06d}.arl"


# -- writing --------------------------------------------------------------------------------------------------------
def file_header(about: Mapping[str, object]) -> bytes:
    text = json.dumps(about).encode()
    start = _FILE.pack(_FILE_MAGIC, FORMAT, len(text), 0)[: -_CHECKSUM.size]
    return _with_checksum(start, text, 0)


def record_head(summary: GroupSummary, payload: bytes, offset: int) -> bytes:
    """Return a record without its payload. The checksum covers the offset, so that a record inside a payload is not valid."""
    text = json.dumps(asdict(summary)).encode()
    start = _RECORD.pack(_RECORD_MAGIC, len(text), len(payload), xxhash.xxh3_64_intdigest(payload), 0)[: -_CHECKSUM.size]
    return _with_checksum(start, text, offset)


def _with_checksum(start: bytes, text: bytes, offset: int) -> bytes:
    return start + _CHECKSUM.pack(_checksum(start, text, offset)) + text


def _checksum(start: bytes | memoryview, text: bytes | memoryview, offset: int) -> int:
    return xxhash.xxh3_64_intdigest(b"".join((start, text)), seed=offset)


# -- reading --------------------------------------------------------------------------------------------------------
def load_index(path: Path) -> SegmentIndex:
    """Return the index from the index file if it fits this file, else by scanning the file."""
    return read_index(path) or scan(path)


def scan(path: Path) -> SegmentIndex:
    """Read the whole file and check every record; after damage, continue at the next valid record."""
    entries: list[SegmentEntry] = []
    damage: list[Damage] = []
    with path.open("rb") as opened:
        file = opened.fileno()
        size = os.fstat(file).st_size
        offset = end = _first_record(file, path)
        while offset < size:
            entry = _entry_at(file, offset)
            if entry is None:
                found = _next_record(file, offset + 1, size)
                if found is None:
                    break
                damage.append(Damage(file=path.name, offset=offset, length=found - offset, reason="no record begins here"))
                offset = end = found
                continue
            if offset + entry.length > size:
                break
            if read_payload(file, entry) is None:
                damage.append(Damage(file=path.name, offset=offset, length=entry.length, reason="its bytes changed"))
            else:
                entries.append(entry)
            offset = end = offset + entry.length
    return SegmentIndex(entries=tuple(entries), damage=tuple(damage), end=end)


def read_payload(file: int, entry: SegmentEntry) -> bytes | None:
    """Return the payload of a record; None if a checksum does not match."""
    record = memoryview(os.pread(file, entry.length, entry.offset))
    if len(record) != entry.length or entry.length < _RECORD.size:
        return None
    magic, head, size, checksum, checksum_found = _RECORD.unpack_from(record)
    text, payload = record[_RECORD.size : _RECORD.size + head], record[_RECORD.size + head :]
    if magic != _RECORD_MAGIC or size != len(payload) or checksum != xxhash.xxh3_64_intdigest(payload):
        return None
    return bytes(payload) if checksum_found == _checksum(record[: _RECORD.size - _CHECKSUM.size], text, entry.offset) else None


def _first_record(file: int, path: Path) -> int:
    """Return the offset of the first record; 0 for a damaged header, because records are then searched for."""
    start = os.pread(file, _FILE.size, 0)
    if len(start) < _FILE.size:
        return 0
    magic, version, length, checksum_found = _FILE.unpack(start)
    if (
        magic != _FILE_MAGIC
        or length > MAX_HEAD
        or checksum_found != _checksum(start[: -_CHECKSUM.size], os.pread(file, length, _FILE.size), 0)
    ):
        return 0
    if version != FORMAT:
        raise ConfigError(f"{path} has archive format {version}, and this release reads {FORMAT}; update async_rl")
    return _FILE.size + length


def _entry_at(file: int, offset: int) -> SegmentEntry | None:
    start = os.pread(file, _RECORD.size, offset)
    if len(start) < _RECORD.size:
        return None
    magic, length, size, _, checksum_found = _RECORD.unpack(start)
    if magic != _RECORD_MAGIC or length > MAX_HEAD:
        return None
    text = os.pread(file, length, offset + _RECORD.size)
    if checksum_found != _checksum(start[: -_CHECKSUM.size], text, offset):
        return None
    try:
        summary = _read_summary(json.loads(text))
    except (ValueError, TypeError, KeyError):
        return None
    return SegmentEntry(summary=summary, offset=offset, length=_RECORD.size + length + size)


def _read_summary(head: Mapping[str, Any]) -> GroupSummary:
    """Parse a summary; fields added by later versions are ignored."""
    return GroupSummary(**{name: head[name] for name in GroupSummary.__dataclass_fields__})


def _next_record(file: int, start: int, size: int) -> int | None:
    """Return the next offset at which a record begins."""
    while start < size:
        chunk = os.pread(file, _CHUNK, start)
        if not chunk:  # the file was truncated meanwhile
            return None
        at = chunk.find(_RECORD_MAGIC)
        while at >= 0:
            if _entry_at(file, start + at) is not None:
                return start + at
            at = chunk.find(_RECORD_MAGIC, at + 1)
        start += max(1, len(chunk) - len(_RECORD_MAGIC) + 1)  # the magic may span two chunks
    return None


# -- the index file: a checksum, a line about the whole file, then one line per record --------------------------------
def index_path(path: Path) -> Path:
    return path.with_suffix(".idx")


def write_index(path: Path, index: SegmentIndex) -> None:
    """Write the index file. If it is damaged later, its checksum shows it, and it is rebuilt."""
    about = {"format": FORMAT, "bytes": index.end, "damage": [asdict(damage) for damage in index.damage]}
    entries = ({**asdict(entry.summary), "offset": entry.offset, "length": entry.length} for entry in index.entries)
    body = "".join(f"{json.dumps(line)}\n" for line in (about, *entries))
    write_whole(index_path(path), f"{xxhash.xxh3_64_hexdigest(body.encode())}\n{body}")


def read_index(path: Path) -> SegmentIndex | None:
    """Return the index of the index file; None if it is missing, damaged, or does not fit this file."""
    try:
        checksum, _, body = index_path(path).read_text().partition("\n")
        about, *lines = [cast("dict[str, Any]", json.loads(line)) for line in body.splitlines()]
        entries = [SegmentEntry(summary=_read_summary(line), offset=line["offset"], length=line["length"]) for line in lines]
        damage = [Damage(**stretch) for stretch in about["damage"]]
        is_whole = checksum == xxhash.xxh3_64_hexdigest(body.encode())
        fits = about["format"] == FORMAT and about["bytes"] == path.stat().st_size
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return SegmentIndex(entries=tuple(entries), damage=tuple(damage), end=about["bytes"]) if is_whole and fits else None
