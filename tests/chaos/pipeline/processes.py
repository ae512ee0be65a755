"""The processes of a run, identified by their command lines, and where they are forks by their names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_ROLES = {"learner": "learner", "rollout_workers": "worker", "buffer": "keeper"}


def descendants(pid: int) -> Iterator[int]:
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:  # it has ended
        return
    for child in children:
        yield child
        yield from descendants(child)


def role_of(pid: int) -> str:
    """Return learner, worker, keeper (the process that supervises the server) or server; "" for any other."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        name = Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""
    if words[0].rpartition("/")[2].startswith(("redis-server", "valkey-server")):
        return "server"
    modules = [words[place + 1] for place, word in enumerate(words[:-1]) if word == "-m"] + [name]
    return next((_ROLES[module] for module in modules if module in _ROLES), "")


def of_role(supervisor: int, role: str) -> list[int]:
    return [pid for pid in descendants(supervisor) if role_of(pid) == role]


def listening_ports(supervisor: int) -> set[int]:
    """Return the TCP ports on which processes of the run listen."""
    sockets = {_inode(link) for pid in descendants(supervisor) for link in _files_of(pid)}
    found: set[int] = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in sockets:
                found.add(int(fields[1].rpartition(":")[2], 16))
    return found


def _files_of(pid: int) -> Iterator[str]:
    try:
        for name in Path(f"/proc/{pid}/fd").iterdir():
            yield str(name.readlink())
    except OSError:
        return


def _inode(link: str) -> str:
    return link.removeprefix("socket:[").removesuffix("]") if link.startswith("socket:[") else ""
