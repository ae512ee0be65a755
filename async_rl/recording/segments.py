"""Numbered files of bounded total size: the oldest is deleted, and what it held is counted.

    learner-000003.jsonl  learner-000004.jsonl  learner-let-go.json

A writer never continues a file of another one, so a file that was torn by a crash stays as it is and readers skip its end.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from async_rl.durable.whole_file import write_whole

SEGMENTS = 8
"""Files within the size limit: what is deleted at once is this part of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LetGo:
    """What is no longer or was never kept."""

    deleted: Mapping[str, int] = field(default_factory=dict[str, int])
    """Deleted with the oldest files because of the size limit: number of `events`, or of `groups` and `rollouts`."""
    deleted_until: float = 0.0
    """Time of the newest deleted one, in seconds since 1970; 0: none was deleted."""
    lost: Mapping[str, int] = field(default_factory=dict[str, int])
    """Never written: the disk refused them (`refused`), they came faster than they were written (`late`), or they were
    dropped and more than may be sent (`unsent`)."""

    @property
    def is_everything_kept(self) -> bool:
        return not any(self.deleted.values()) and not any(self.lost.values())

    def __str__(self) -> str:
        deleted = [f"{count} {what} deleted at the size limit" for what, count in self.deleted.items() if count]
        return ", ".join([*deleted, *(f"{count} lost ({why})" for why, count in self.lost.items() if count)])

    def and_also(self, other: LetGo) -> LetGo:
        return LetGo(
            deleted=Counter(self.deleted) + Counter(other.deleted),
            deleted_until=max(self.deleted_until, other.deleted_until),
            lost=Counter(self.lost) + Counter(other.lost),
        )


class SegmentedFile:
    """The numbered files of one writer, NAME-000001.jsonl and so on; a data file of the same number may lie beside each."""

    def __init__(self, folder: Path, name: str, *, max_bytes: int, count: Callable[[Path], tuple[Mapping[str, int], float]]):
        """`count` returns what a file holds, and the time of its newest row."""
        self.folder, self._name, self._max_bytes, self._count = folder, name, max_bytes, count
        self.let_go = read_let_go(folder, name)
        self._counting = threading.Lock()

    @property
    def segment_bytes(self) -> int:
        """The size at which a file is full."""
        return max(1, self._max_bytes // SEGMENTS)

    def begin(self) -> Path:
        """Create the next file and delete the oldest ones beyond the size limit. Raises OSError."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._make_room()
        with suppress(OSError):
            self.save()
        found = segments_in(self.folder, self._name)
        number = segment_number(found[-1]) + 1 if found else 1
        while True:
            path = self.folder / f"{self._name}-{number:06d}.jsonl"
            with suppress(FileExistsError):
                os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
                return path
            number += 1

    def note_lost(self, why: str, number: int) -> None:
        """Count rows that are not kept; written with the next `save`."""
        if number:
            self._add(LetGo(lost={why: number}))

    def save(self) -> None:
        """Write what was let go. Raises OSError."""
        let_go = self.let_go
        if self.folder.is_dir() and let_go != read_let_go(self.folder, self._name):
            kept = {"deleted": dict(let_go.deleted), "deleted_until": let_go.deleted_until, "lost": dict(let_go.lost)}
            write_whole(let_go_path(self.folder, self._name), json.dumps(kept))

    def _add(self, more: LetGo) -> None:
        with self._counting:  # the recorder's thread, and those that give it what is too much
            self.let_go = self.let_go.and_also(more)

    def _make_room(self) -> None:
        found = segments_in(self.folder, self._name)
        sizes = [sum(file.stat().st_size for file in files_of(path)) for path in found]
        while found and sum(sizes) + self.segment_bytes > self._max_bytes:
            path, _ = found.pop(0), sizes.pop(0)
            number, until = self._count(path)
            self._add(LetGo(deleted=number, deleted_until=until))
            with suppress(OSError):  # a full disk: deleting makes room, and the next `save` writes the count
                self.save()
            for file in reversed(files_of(path)):
                file.unlink(missing_ok=True)


def segments_in(folder: Path, name: str = "") -> list[Path]:
    """The files of one writer, or of all of them, oldest first."""
    wanted = re.compile(rf"{re.escape(name) or r'[a-z]+'}-\d{{6,}}\.jsonl")
    with suppress(FileNotFoundError):
        return sorted((path for path in folder.iterdir() if wanted.fullmatch(path.name)), key=lambda path: path.name)
    return []


def segment_number(path: Path) -> int:
    return int(path.stem.rpartition("-")[2])


def data_path(path: Path) -> Path:
    """The data file beside a file of rows."""
    return path.with_suffix(".bin")


def files_of(path: Path) -> list[Path]:
    return [file for file in (path, data_path(path)) if file.exists()]


def let_go_path(folder: Path, name: str) -> Path:
    return folder / f"{name}-let-go.json"


def read_let_go(folder: Path, name: str = "") -> LetGo:
    """What one writer, or all writers of a folder, let go."""
    found = LetGo()
    for path in [let_go_path(folder, name)] if name else sorted(folder.glob("*-let-go.json")):
        with suppress(OSError, ValueError, KeyError, TypeError):
            kept: dict[str, Any] = json.loads(path.read_bytes())
            found = found.and_also(LetGo(deleted=kept["deleted"], deleted_until=kept["deleted_until"], lost=kept["lost"]))
    return found
