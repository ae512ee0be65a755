"""Cores, memory, shared memory and limits of this machine, or of the container."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from async_rl.doctor.cgroup import CgroupLimits, read_limits
from async_rl.doctor.verdict import GIB, MIB, Verdict, bad, in_size, look, ok
from async_rl.supervision.processes.descriptors import LEAST, RAISE_IT

LITTLE_MEMORY = 2 * GIB
"""Each process of a run imports torch."""
DEFAULT_SHM = 64 * MIB
"""What containers get unless they ask for more."""
FEW_DESCRIPTORS = 4096
"""A learner needs tens of descriptors for each process group."""
FEW_PROCESSES = 1024
"""Threads count as processes, and each process of a run has tens of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceFacts:
    cores: int
    omp_threads: str = ""
    """$OMP_NUM_THREADS."""
    cgroup: CgroupLimits = field(default_factory=CgroupLimits)
    memory: int
    memory_free: int
    """What programs can still get."""
    memory_needed: int = 0
    """What the run's private Redis may take."""
    shm: int | None
    """Size of /dev/shm; None: there is none."""
    shm_free: int = 0
    descriptors: int | None
    """The system's limit for a process, to which ours raise themselves; None: no limit."""
    processes: int | None
    """Limit of processes of this user; None: there is none."""


def gather_resources(environ: Mapping[str, str], *, memory_needed: int) -> ResourceFacts:
    meminfo = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in _meminfo())}
    shm = os.statvfs("/dev/shm") if Path("/dev/shm").is_dir() else None
    return ResourceFacts(
        cores=len(os.sched_getaffinity(0)),
        omp_threads=environ.get("OMP_NUM_THREADS", ""),
        cgroup=read_limits(),
        memory=meminfo["MemTotal"],
        memory_free=meminfo["MemAvailable"],
        memory_needed=memory_needed,
        shm=shm.f_blocks * shm.f_frsize if shm is not None else None,
        shm_free=shm.f_bavail * shm.f_frsize if shm is not None else 0,
        descriptors=_limit(resource.RLIMIT_NOFILE),
        processes=_limit(resource.RLIMIT_NPROC),
    )


def judge_resources(facts: ResourceFacts) -> Iterator[Verdict]:
    yield _judge_cores(facts)
    yield _judge_memory(facts)
    yield _judge_shared_memory(facts)
    yield _judge_descriptors(facts.descriptors)
    yield _judge_processes(facts)


def _judge_cores(facts: ResourceFacts) -> Verdict:
    quota = facts.cgroup.cores
    given = facts.cores if quota is None else min(facts.cores, quota)
    found = f"{facts.cores} {'core' if facts.cores == 1 else 'cores'}"
    if quota is not None and quota < facts.cores:
        found = f"{found}, of which the cgroup gives the time of {quota:g}"
    threads = facts.omp_threads.partition(",")[0]
    if threads.isdigit():
        found = f"{found}, OMP_NUM_THREADS={threads}"
        if int(threads) > max(1, given):
            return look("cpu", found, f"OMP_NUM_THREADS={max(1, int(given))}: more threads than cores slow each other down")
    elif quota is not None and quota < facts.cores:
        return look("cpu", found, f"OMP_NUM_THREADS={max(1, int(given))}: thread pools count the cores that they see")
    return ok("cpu", found)


def _judge_memory(facts: ResourceFacts) -> Verdict:
    limit = facts.cgroup.memory
    free = facts.memory_free if limit is None else min(facts.memory_free, limit - facts.cgroup.memory_used)
    found = f"{in_size(free)} free of {in_size(facts.memory)}"
    if limit is not None and limit < facts.memory:
        found = f"{in_size(free)} free of {in_size(limit)}, the limit of the cgroup"
    if free < facts.memory_needed:
        return bad(
            "memory",
            f"{found}, and the private Redis may take {in_size(facts.memory_needed)}",
            "free some, raise the container's limit, or lower redis.max_memory_mb",
        )
    if free < LITTLE_MEMORY:
        return look(
            "memory",
            found,
            "end other programs, or raise the container's limit; `async-rl config check` plans what a run needs",
        )
    return ok("memory", found)


def _judge_shared_memory(facts: ResourceFacts) -> Verdict:
    enlarge = "enlarge it: --shm-size of docker and podman, in Kubernetes an emptyDir with medium Memory at /dev/shm"
    if facts.shm is None:
        return look("shared memory", "there is no /dev/shm, which NCCL and payload files use", "mount a tmpfs there")
    found = f"{in_size(facts.shm_free)} free of {in_size(facts.shm)} in /dev/shm"
    if facts.shm <= DEFAULT_SHM:
        return look("shared memory", f"{found}, too little for NCCL between several GPUs", enlarge)
    if facts.shm_free < facts.shm / 10:
        return look("shared memory", found, "remove what ended programs have left in /dev/shm, or enlarge it")
    return ok("shared memory", found)


def _judge_descriptors(limit: int | None) -> Verdict:
    found = "no limit" if limit is None else f"at most {limit} in a process"
    if limit is not None and limit < LEAST:
        return bad("file descriptors", f"{found}, and a process of a run needs {LEAST}", RAISE_IT)
    if limit is not None and limit < FEW_DESCRIPTORS:
        return look("file descriptors", f"{found}, few for a learner of many ranks and workers", RAISE_IT)
    return ok("file descriptors", found)


def _judge_processes(facts: ResourceFacts) -> Verdict:
    limits = [each for each in (facts.processes, facts.cgroup.processes) if each is not None]
    if not limits:
        return ok("processes", "no limit")
    found = f"at most {min(limits)}, threads included"
    if min(limits) < FEW_PROCESSES:
        return look("processes", found, "raise `ulimit -Hu`, TasksMax= of systemd, or --pids-limit of the container")
    return ok("processes", found)


def _limit(kind: int) -> int | None:
    """The hard limit."""
    return None if (hard := resource.getrlimit(kind)[1]) == resource.RLIM_INFINITY else hard


def _meminfo() -> list[str]:
    return Path("/proc/meminfo").read_text().splitlines()
