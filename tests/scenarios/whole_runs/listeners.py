"""What the processes below one of ours listen on, as the kernel says it: /proc/net joined with their descriptors."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TCP_LISTEN, UNIX_LISTEN = "0A", 0x10000
PROC = Path("/proc")


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Listener:
    role: str
    """What the process is: `learner`, `redis`, ..."""
    kind: str
    """tcp or unix."""
    address: str
    """Of TCP the host, of a socket its path; one without a path begins with @."""
    port: int
    pid: int


def listeners_below(pid: int) -> set[Listener]:
    found = set[Listener]()
    for each in family(pid):
        sockets = _sockets_of(each)
        role = role_of(each)
        for kind, address, port, inode in _all_listening(each):
            if inode in sockets:
                found.add(Listener(role=role, kind=kind, address=address, port=port, pid=each))
    return found


def family(pid: int) -> list[int]:
    """A process and all that descend from it and are there."""
    return [pid, *(other for child in _children(pid) for other in family(child))]


def role_of(pid: int) -> str:
    """The module that a process of ours runs; otherwise its program."""
    try:
        words = (PROC / str(pid) / "cmdline").read_text().split("\0")
    except OSError:
        return "gone"
    if "-m" in words:
        module = words[words.index("-m") + 1]
        return module.removesuffix(".__main__")
    program = Path(words[0].split(" ")[0]).name  # servers write their address behind their name
    if program.startswith(("redis-server", "valkey-server")):
        return "redis"
    return "async-rl" if any(word.endswith("/async-rl") for word in words[:2]) else program


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    descriptors: int
    threads: int
    resident_mb: float


def usage(pid: int) -> Usage:
    own = PROC / str(pid)
    status = dict(line.split(":", 1) for line in (own / "status").read_text().splitlines())
    return Usage(
        descriptors=len(list((own / "fd").iterdir())),
        threads=int(status["Threads"]),
        resident_mb=int(status["VmRSS"].split()[0]) / 1024,
    )


def _children(pid: int) -> list[int]:
    try:
        tasks = list((PROC / str(pid) / "task").iterdir())
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return []


def _sockets_of(pid: int) -> set[str]:
    found = set[str]()
    try:
        for descriptor in (PROC / str(pid) / "fd").iterdir():
            try:
                target = str(descriptor.readlink())
            except OSError:
                continue
            if inode := re.fullmatch(r"socket:\[(\d+)\]", target):
                found.add(inode[1])
    except OSError:
        pass
    return found


def _all_listening(pid: int) -> Iterator[tuple[str, str, int, str]]:
    net = PROC / str(pid) / "net"
    for file in ("tcp", "tcp6"):
        for line in _rows(net / file):
            fields = line.split()
            if fields[3] == TCP_LISTEN:
                host, _, port = fields[1].partition(":")
                yield "tcp", _host(host), int(port, 16), fields[9]
    for line in _rows(net / "unix"):
        fields = line.split()
        if int(fields[3], 16) & UNIX_LISTEN:
            yield "unix", fields[7] if len(fields) > 7 else "", 0, fields[6]


def _rows(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()[1:]
    except OSError:
        return []


def _host(text: str) -> str:
    """The kernel writes addresses as words in the byte order of the machine."""
    words = [bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8)]
    address = ipaddress.ip_address(b"".join(words))
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped if mapped is not None else address)
