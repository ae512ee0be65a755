"""Finds and kills process trees through /proc. Elsewhere than on Linux only the process group is killed."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


def children_of(pid: int) -> list[int]:
    """Child processes of any of its threads that have not been waited for."""
    found: list[int] = []
    with suppress(OSError):  # the process is gone, or this is not Linux
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                found += map(int, (thread / "children").read_text().split())
    return found


def children_of_this_thread() -> list[int]:
    """Child processes started by the calling thread, or inherited from a thread that ended."""
    with suppress(OSError):
        return [int(pid) for pid in Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()]
    return []


def descendants_of(pid: int) -> list[int]:
    return [found for child in children_of(pid) for found in (child, *descendants_of(child))]


def command_of(pid: int) -> str:
    """The words of a process' command; "?" if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return "?"


def kill_tree(leader: int) -> None:
    """Kill a process group by its leader's id, and all descendants, including those in other groups and sessions."""
    below = descendants_of(leader)
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)
    kill_each(below)


def kill_each(pids: Iterable[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
