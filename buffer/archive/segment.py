"""One file of the archive: records that prove themselves, one after the other, and an index that anybody can rebuild.

docs/archive.md says what stands at which byte. Whatever a file holds, reading it never fails: a record is sound, or
it is damage, or the file ends in its middle.
"""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import xxhash

from async_rl.durable.whole_file import write_whole
from async_rl.errors import ConfigError

FORMAT = 1
MAX_HEAD = 4096
"""Bytes of text before a payload; more than that is not ours, and need not be read to know it."""

_FILE = struct.Struct("<4sHxxIQ")
_FILE_MAGIC = b"ARLS"
_RECORD = struct.Struct("<4sIQQQ")
_RECORD_MAGIC = b"ARLR"
_SEAL = struct.Struct("<Q")
"""Ends both headers: the checksum of everything in front of it and of the text behind it."""
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSummary:
    """What a record says of its group, so that nobody must decode groups to choose among them."""

    id: str
    step: int
    """The last step that trained it."""
    time: float
    """When it was archived, in seconds since 1970."""
    environment: str
    tokens: int
    """Sampled ones."""
    reward: float | None
    """The mean of its rollouts; None if none of them has one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentEntry:
    """Where a record lies."""

    summary: GroupSummary
    offset: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """A stretch of a file that cannot be read."""

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
    """Behind the last record; what follows is a record that was never finished."""


def files_in(folder: Path) -> list[Path]:
    """Oldest first."""
    found = [path for path in folder.glob("groups-*.arl") if re.fullmatch(r"groups-\d{6,}\.arl", path.name)]
    return sorted(found, key=number_of)


def number_of(path: Path) -> int:
    return int(path.stem.removeprefix("groups-"))


def file_number(folder: Path, number: int) -> Path:
    return folder / f"groups-{number:06d}.arl"


# -- writing --------------------------------------------------------------------------------------------------------
def file_header(about: Mapping[str, object]) -> bytes:
    text = json.dumps(about).encode()
    start = _FILE.pack(_FILE_MAGIC, FORMAT, len(text), 0)[: -_SEAL.size]
    return _sealed(start, text, 0)


def record_head(summary: GroupSummary, payload: bytes, offset: int) -> bytes:
    """All of a record but its payload. Sealed with its offset, so that a record inside a payload passes for nothing."""
    text = json.dumps(asdict(summary)).encode()
    start = _RECORD.pack(_RECORD_MAGIC, len(text), len(payload), xxhash.xxh3_64_intdigest(payload), 0)[: -_SEAL.size]
    return _sealed(start, text, offset)


def _sealed(start: bytes, text: bytes, offset: int) -> bytes:
    return start + _SEAL.pack(_seal(start, text, offset)) + text


def _seal(start: bytes | memoryview, text: bytes | memoryview, offset: int) -> int:
    return xxhash.xxh3_64_intdigest(b"".join((start, text)), seed=offset)


# -- reading --------------------------------------------------------------------------------------------------------
@contextmanager
def opened(path: Path) -> Generator[int]:
    file = os.open(path, os.O_RDONLY)
    try:
        yield file
    finally:
        os.close(file)


def index_of(path: Path) -> SegmentIndex:
    """From the index file if that is about this very file, else from the file itself."""
    return read_index(path) or scan(path)


def scan(path: Path) -> SegmentIndex:
    """Read the whole file and check every record. After damage, go on at the next record that can be found."""
    entries: list[SegmentEntry] = []
    damage: list[Damage] = []
    with opened(path) as file:
        size = os.fstat(file).st_size
        offset = end = _start(file, path)
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
            if payload_of(file, entry) is None:
                damage.append(_unsound(path, entry))
            else:
                entries.append(entry)
            offset = end = offset + entry.length
    return SegmentIndex(entries=tuple(entries), damage=tuple(damage), end=end)


def payload_of(file: int, entry: SegmentEntry) -> bytes | None:
    """The group's bytes as they were archived; None if they are not what they were."""
    record = memoryview(os.pread(file, entry.length, entry.offset))
    if len(record) != entry.length or entry.length < _RECORD.size:
        return None
    magic, head, size, checksum, seal = _RECORD.unpack_from(record)
    text, payload = record[_RECORD.size : _RECORD.size + head], record[_RECORD.size + head :]
    if magic != _RECORD_MAGIC or size != len(payload) or checksum != xxhash.xxh3_64_intdigest(payload):
        return None
    return bytes(payload) if seal == _seal(record[: _RECORD.size - _SEAL.size], text, entry.offset) else None


def _unsound(path: Path, entry: SegmentEntry) -> Damage:
    return Damage(file=path.name, offset=entry.offset, length=entry.length, reason="its bytes changed")


def _start(file: int, path: Path) -> int:
    """Where the first record stands. A header that is damaged costs nothing: the records are searched for."""
    start = os.pread(file, _FILE.size, 0)
    if len(start) < _FILE.size:
        return 0
    magic, version, length, seal = _FILE.unpack(start)
    if magic != _FILE_MAGIC or length > MAX_HEAD or seal != _seal(start[: -_SEAL.size], os.pread(file, length, _FILE.size), 0):
        return 0
    if version != FORMAT:
        raise ConfigError(f"{path} is of archive format {version} and this version reads {FORMAT}; update async_rl")
    return _FILE.size + length


def _entry_at(file: int, offset: int) -> SegmentEntry | None:
    start = os.pread(file, _RECORD.size, offset)
    if len(start) < _RECORD.size:
        return None
    magic, length, size, _, seal = _RECORD.unpack(start)
    if magic != _RECORD_MAGIC or length > MAX_HEAD:
        return None
    text = os.pread(file, length, offset + _RECORD.size)
    if seal != _seal(start[: -_SEAL.size], text, offset):
        return None
    try:
        summary = _read_summary(json.loads(text))
    except (ValueError, TypeError, KeyError):
        return None
    return SegmentEntry(summary=summary, offset=offset, length=_RECORD.size + length + size)


def _read_summary(head: Mapping[str, Any]) -> GroupSummary:
    """What a later version adds to a record is passed over."""
    return GroupSummary(**{name: head[name] for name in GroupSummary.__dataclass_fields__})


def _next_record(file: int, start: int, size: int) -> int | None:
    """The next offset at which a record begins."""
    while start < size:
        chunk = os.pread(file, _CHUNK, start)
        if not chunk:  # it was cut meanwhile
            return None
        at = chunk.find(_RECORD_MAGIC)
        while at >= 0:
            if _entry_at(file, start + at) is not None:
                return start + at
            at = chunk.find(_RECORD_MAGIC, at + 1)
        start += max(1, len(chunk) - len(_RECORD_MAGIC) + 1)  # a magic may lie across two chunks
    return None


# -- the index file: a checksum, what the file holds in all, then one line per record ---------------------------------
def index_file(path: Path) -> Path:
    return path.with_suffix(".idx")


def write_index(path: Path, index: SegmentIndex) -> None:
    """What a power loss makes of it is noticed, and it is made again."""
    about = {"format": FORMAT, "bytes": index.end, "damage": [asdict(damage) for damage in index.damage]}
    entries = ({**asdict(entry.summary), "offset": entry.offset, "length": entry.length} for entry in index.entries)
    body = "".join(f"{json.dumps(line)}\n" for line in (about, *entries))
    write_whole(index_file(path), f"{xxhash.xxh3_64_hexdigest(body.encode())}\n{body}")


def read_index(path: Path) -> SegmentIndex | None:
    """None if there is no index, or if it is about something else than this file."""
    try:
        about, *lines = [cast("dict[str, Any]", json.loads(line)) for line in _index_lines(path)]
        entries = [SegmentEntry(summary=_read_summary(line), offset=line["offset"], length=line["length"]) for line in lines]
        damage = [Damage(**stretch) for stretch in about["damage"]]
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return SegmentIndex(entries=tuple(entries), damage=tuple(damage), end=about["bytes"])


def is_indexed(path: Path) -> bool:
    """Its index is whole and about this very file."""
    try:
        return bool(_index_lines(path))
    except (OSError, ValueError, TypeError, KeyError):
        return False


def _index_lines(path: Path) -> list[str]:
    checksum, _, body = index_file(path).read_text().partition("\n")
    if checksum != xxhash.xxh3_64_hexdigest(body.encode()):
        raise ValueError("it is damaged")
    lines = body.splitlines()
    about = json.loads(lines[0])
    if about["format"] != FORMAT or about["bytes"] != path.stat().st_size:
        raise ValueError("it is about another file")
    return lines
