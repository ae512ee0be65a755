"""The limit of open file descriptors."""

from __future__ import annotations

import resource
from pathlib import Path


def raise_descriptor_limit() -> None:
    """Raise the limit to what the system allows. The default of 1,024 exists for select(), which we do not use; a learner needs
    tens of descriptors per process group, and gloo aborts a process without free ones.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def descriptors_are_scarce() -> bool:
    """Whether more than half of the descriptors are in use. False if the system does not tell."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        return soft != resource.RLIM_INFINITY and 2 * sum(1 for _ in Path("/proc/self/fd").iterdir()) > soft
    except OSError:
        return False
