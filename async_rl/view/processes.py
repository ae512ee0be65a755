"""The processes that `async-rl run` has started on this machine (processes.json), and whether they live."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

_PROC = Path("/proc")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessState:
    name: str
    pid: int
    is_alive: bool


def local_processes(folder: Path) -> list[ProcessState]:
    """Empty if the file is missing: then other launchers, or other machines, have started the processes."""
    try:
        found: Any = json.loads((folder / "processes.json").read_text())
    except (OSError, ValueError):
        return []
    if not isinstance(found, dict):
        return []
    pids = {name: pid for name, pid in cast("dict[str, Any]", found).items() if isinstance(pid, int)}
    return [ProcessState(name=name, pid=pid, is_alive=_is_alive(pid, folder)) for name, pid in pids.items()]


def _is_alive(pid: int, folder: Path) -> bool:
    """Whether the process lives and is one of this folder: ids are given again after a while."""
    try:
        os.kill(pid, 0)
    except OSError:  # gone, or of another user
        return False
    if not _PROC.exists():
        return True
    try:
        words = (_PROC / str(pid) / "cmdline").read_text().split("\0")
        at = (_PROC / str(pid) / "cwd").readlink()
    except OSError:
        return False
    config = (folder / "config.yaml").resolve()
    return any((at / word).resolve() == config for word in words if word.endswith("config.yaml"))
