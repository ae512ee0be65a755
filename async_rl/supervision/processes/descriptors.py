"""How many files and sockets a process may have open."""

from __future__ import annotations

import resource
from pathlib import Path


def raise_descriptor_limit() -> None:
    """To what the system allows. The default of 1,024 is for programs that use select(), which ours do not; a learner has tens
    of descriptors for each process group, and gloo ends the process that has none left.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def descriptors_are_scarce() -> bool:
    """More than half of what this process may have open is open. False where the system does not say."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        return soft != resource.RLIM_INFINITY and 2 * sum(1 for _ in Path("/proc/self/fd").iterdir()) > soft
    except OSError:
        return False
