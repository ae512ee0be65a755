"""Which ports a process has open, as Linux tells it."""

from __future__ import annotations

import socket
from contextlib import suppress
from pathlib import Path

IS_TOLD = Path("/proc/net/tcp").exists()


def listeners(pid: int) -> list[tuple[str, int]]:
    """Every TCP address at which a process listens."""
    links: set[str] = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            links.add(str(link.readlink()))
    found: list[tuple[str, int]] = []
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in links:
                host, port = local.split(":")
                words = [bytes.fromhex(host[start : start + 8])[::-1] for start in range(0, len(host), 8)]
                found.append((socket.inet_ntop(family, b"".join(words)), int(port, 16)))
    return found
