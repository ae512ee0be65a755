"""Atomic, durable replacement of files (write, fsync, rename, fsync of the folder). Every file replaced as a whole uses it."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from async_rl.durable.failpoints import define, failpoint

define("whole_file.writing", "whole_file.written", "whole_file.renamed")


def write_whole(path: Path, content: str | bytes) -> None:
    """Replace a file. When this returns, the content survives a power loss; after an OSError the old content is unchanged."""
    data = content.encode() if isinstance(content, str) else content
    draft = path.with_name(f".{path.name}.partial")
    try:
        with draft.open("wb", buffering=0) as file:
            write_all(file.fileno(), data)
            os.fsync(file.fileno())
        failpoint("whole_file.written")
        draft.replace(path)
        failpoint("whole_file.renamed")
        sync_folder(path.parent)
    except OSError:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise


def write_all(file: int, data: bytes | memoryview) -> int:
    """Write all of `data` to a descriptor, continuing after partial writes, and return its length."""
    rest = memoryview(data)
    while rest:
        failpoint("whole_file.writing")
        rest = rest[os.write(file, rest) :]
    return len(data)


def sync_folder(folder: Path) -> None:
    """Fsync a folder, which makes created and renamed entries durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
