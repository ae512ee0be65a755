"""The disks that a run writes to: kind, room, and how long a durable write takes."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from async_rl.doctor.verdict import GIB, Verdict, bad, in_size, look, ok
from async_rl.durable.whole_file import write_whole

WRITES = 8
LITTLE_ROOM = 10 * GIB
NO_ROOM = GIB
SLOW_S = 0.1
"""The learner waits for a durable write of its journal at each step."""
ON_A_NETWORK = frozenset(
    ("nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "gpfs", "beegfs", "glusterfs", "9p", "virtiofs", "afs")
)
GOES_AWAY = frozenset(("overlay", "tmpfs", "ramfs"))


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskFacts:
    check: str
    folder: Path
    kind: str
    """Type of its file system."""
    size: int
    free: int
    write_s: tuple[float, ...] = ()
    """Times of small durable writes."""
    problem: str = ""
    """Why nothing can be written there."""
    needed: int = 0
    """What the run may write there."""
    holds_redis: bool = False
    """Whether the private Redis keeps its file there."""
    may_go_away: bool = False
    """Whether what it holds need not outlive the container or a reboot."""


def gather_disk(
    check: str, folder: Path, *, needed: int = 0, holds_redis: bool = False, may_go_away: bool = False
) -> DiskFacts:
    """Look at the file system of a folder, or of the nearest one above it that exists, and write there."""
    exists = next(each for each in (folder, *folder.parents) if each.is_dir())
    disk = os.statvfs(exists)
    times, problem = _try_writes(exists)
    return DiskFacts(
        check=check,
        folder=folder,
        kind=_kind_of(exists.resolve(), Path("/proc/self/mountinfo").read_text()),
        size=disk.f_blocks * disk.f_frsize,
        free=disk.f_bavail * disk.f_frsize,
        write_s=times,
        problem=problem,
        needed=needed,
        holds_redis=holds_redis,
        may_go_away=may_go_away,
    )


def judge_disk(facts: DiskFacts) -> Iterator[Verdict]:
    """Yield one verdict, about the worst that was found."""
    place = f"{facts.folder} ({facts.kind or 'unknown file system'})"
    if facts.problem:
        yield bad(facts.check, f"{place} cannot be written: {facts.problem}", "choose another folder, or become its owner")
        return
    found = f"{place} has {in_size(facts.free)} free of {in_size(facts.size)}"
    if facts.write_s:
        found = (
            f"{found}, a durable write takes {1000 * median(facts.write_s):.1f} ms, at most {1000 * max(facts.write_s):.1f} ms"
        )
    if facts.size < facts.needed:
        yield bad(facts.check, f"{found}, but may hold {in_size(facts.needed)}", "enlarge it, or lower redis.payloads_max_mb")
    elif facts.free < NO_ROOM:
        yield bad(facts.check, found, "make room: checkpoints and the journal would not fit, and training would wait")
    elif facts.write_s and median(facts.write_s) > SLOW_S:
        yield look(facts.check, found, "use a faster disk: the learner waits for a durable write at each step")
    elif facts.kind in GOES_AWAY and not facts.may_go_away:
        yield look(facts.check, found, "it goes with the container or at a reboot: mount a volume, and name it in run.folder")
    elif facts.holds_redis and (facts.kind in ON_A_NETWORK or facts.kind.startswith("fuse.")):
        yield look(
            facts.check, found, "the private Redis keeps its file there: use a local disk, or a Redis of your own (redis.url)"
        )
    elif facts.free < LITTLE_ROOM:
        yield look(facts.check, found, "make room, or keep fewer checkpoints (`async-rl checkpoints prune`)")
    else:
        yield ok(facts.check, found)


def _try_writes(folder: Path) -> tuple[tuple[float, ...], str]:
    path, times = folder / f".async-rl-doctor-{os.getpid()}", list[float]()
    try:
        for _ in range(WRITES):
            began = time.perf_counter()
            write_whole(path, bytes(4096))
            times.append(time.perf_counter() - began)
        path.unlink()
    except OSError as error:
        return (), error.strerror or str(error)
    return tuple(times), ""


def _kind_of(folder: Path, mountinfo: str) -> str:
    """The type of the last file system that is mounted at the folder or nearest above it."""
    nearest, kind = -1, ""
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        place = Path(re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), before.split()[4]))
        if folder.is_relative_to(place) and len(place.parts) >= nearest:
            nearest, kind = len(place.parts), after.split()[0]
    return kind
