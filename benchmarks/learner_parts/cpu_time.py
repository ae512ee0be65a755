"""CPU time of a run's processes, by role, from Linux' /proc."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path

PROC = Path("/proc")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
ROLES = {"rollout_workers": "worker", "learner": "learner"}
OTHERS = "others"


def cpu_seconds(root: int) -> dict[str, float]:
    """CPU seconds of a process and of all that it started and that still run: worker, learner, others. Empty without /proc."""
    parents: dict[int, int] = {}
    spent: dict[int, float] = {}
    for entry in PROC.iterdir() if PROC.is_dir() else ():
        if entry.name.isdecimal() and (fields := _fields(entry)):
            parents[int(entry.name)], spent[int(entry.name)] = int(fields[1]), (int(fields[11]) + int(fields[12])) / TICKS_PER_S
    found = defaultdict[str, float](float)
    for process, seconds in spent.items():
        if _descends(process, root, parents):
            found[_role(process)] += seconds
    return dict(found)


def _fields(process: Path) -> list[str]:
    """What stands in `stat` behind the name, which may hold blanks."""
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has ended
        return []


def _descends(process: int, root: int, parents: dict[int, int]) -> bool:
    while process in parents and process != root:
        process = parents[process]
    return process == root


def _role(process: int) -> str:
    try:
        words = (PROC / str(process) / "cmdline").read_text().split("\0")
    except OSError:
        return OTHERS
    return next((ROLES[word] for word in words if word in ROLES), OTHERS)
