"""The rank processes of this process' engines, as the system sees them."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def ranks() -> dict[int, str]:
    """Rank processes of this one, with their command lines."""
    found: dict[int, str] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(FileNotFoundError, ProcessLookupError):  # others come and go
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and "replicas.rank" in (line := (folder / "cmdline").read_text()):
                found[int(folder.name)] = line
    return found
