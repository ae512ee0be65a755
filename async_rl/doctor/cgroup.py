"""Limits that a container or a service manager sets for this process: cgroups of either version."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True, kw_only=True)
class CgroupLimits:
    """None: no limit."""

    cores: float | None = None
    memory: int | None = None
    memory_used: int = 0
    """Without the cache of files, which the kernel gives up."""
    processes: int | None = None


def read_limits(root: Path = ROOT, own: str | None = None) -> CgroupLimits:
    """Read the tightest limits of this process' cgroup and those above it. `own`: what /proc/self/cgroup says."""
    lines = (own if own is not None else _text(Path("/proc/self/cgroup"))).splitlines()
    paths = {name: path for line in lines for names, path in [line.split(":", 2)[1:]] for name in names.split(",")}
    if "" in paths and (root / "cgroup.controllers").exists():
        return _version_2(list(_and_above(root, paths[""])))
    return _version_1(root, paths)


def _version_2(folders: list[Path]) -> CgroupLimits:
    cores = [
        int(quota) / int(period) for folder in folders for quota, period in [_two(_text(folder / "cpu.max"))] if quota.isdigit()
    ]
    limited = [(int(text), folder) for folder in folders if (text := _text(folder / "memory.max")).isdigit()]
    memory, holder = min(limited, default=(None, None))
    return CgroupLimits(
        cores=min(cores, default=None),
        memory=memory,
        memory_used=_used(holder, "memory.current", "inactive_file") if holder is not None else 0,
        processes=_least(_text(folder / "pids.max") for folder in folders),
    )


_UNLIMITED = 1 << 60
"""Version 1 shows a limit that was never set as a number near 2**63."""


def _version_1(root: Path, paths: dict[str, str]) -> CgroupLimits:
    def folders(controller: str) -> list[Path]:
        return list(_and_above(root / controller, paths.get(controller, "/")))

    quotas = [(_text(each / "cpu.cfs_quota_us"), _text(each / "cpu.cfs_period_us")) for each in folders("cpu")]
    limited = [
        (int(text), each)
        for each in folders("memory")
        if (text := _text(each / "memory.limit_in_bytes")).isdigit() and int(text) < _UNLIMITED
    ]
    memory, holder = min(limited, default=(None, None))
    return CgroupLimits(
        cores=min((int(quota) / int(period) for quota, period in quotas if quota.isdigit() and period.isdigit()), default=None),
        memory=memory,
        memory_used=_used(holder, "memory.usage_in_bytes", "total_inactive_file") if holder is not None else 0,
        processes=_least(_text(each / "pids.max") for each in folders("pids")),
    )


def _and_above(root: Path, path: str) -> Iterator[Path]:
    """The folder of a cgroup and all above it. In a container, some of them do not exist."""
    folder = root / path.strip("/")
    yield folder
    yield from (above for above in folder.parents if above.is_relative_to(root))


def _used(folder: Path, usage: str, cache: str) -> int:
    statistics = dict(_two(line) for line in _text(folder / "memory.stat").splitlines())
    return int(_text(folder / usage) or 0) - int(statistics.get(cache, "0"))


def _least(texts: Iterable[str]) -> int | None:
    return min((int(text) for text in texts if text.isdigit()), default=None)


def _two(text: str) -> tuple[str, str]:
    first, _, second = text.partition(" ")
    return first, second


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
