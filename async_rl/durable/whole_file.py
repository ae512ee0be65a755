"""A file that is replaced as a whole: readers see the old content or the new one, and what is written survives a power loss."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from async_rl.durable.failpoints import define, failpoint

define("whole_file.writing", "whole_file.written", "whole_file.renamed")


def write_whole(path: Path, content: str | bytes) -> None:
    """Durable when it returns. After an OSError the old content is still there."""
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
    """Write `data` to a descriptor and return its length. A disk that fills up takes a part, and refuses the rest."""
    rest = memoryview(data)
    while rest:
        failpoint("whole_file.writing")
        rest = rest[os.write(file, rest) :]
    return len(data)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable: a new one is only once the folder is."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
