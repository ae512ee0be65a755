"""How many files and sockets a process may have open."""

from __future__ import annotations

import resource


def raise_descriptor_limit() -> None:
    """To what the system allows. The default of 1,024 is for programs that use select(), which ours do not; a learner has tens
    of descriptors for each process group, and gloo ends the process that has none left.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
