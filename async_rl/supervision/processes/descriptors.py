"""The limit of open file descriptors."""

from __future__ import annotations

import errno
import math
import os
import resource
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

from async_rl.errors import ConfigError, ServiceStopped
from async_rl.supervision.liveness.watchdog import BEAT_S, end_process, watched

LEAST = 256
"""A learner of two ranks with one worker needs more than 120."""

IN_A_ROW = 3
"""Process groups that may fail in a row for want of descriptors."""

RAISE_IT = "raise the system's limit (`ulimit -Hn`, LimitNOFILE= of systemd)"

OUT_S = 20.0
"""Seconds without a free descriptor after which a process ends. A burst of connections is over before."""


@contextmanager
def enough_descriptors(within_s: float = OUT_S) -> Generator[None]:
    """Raise the limit to what the system allows (ConfigError below `LEAST`), and end the process (ServiceStopped) when inside
    no descriptor was free for `within_s`: it could neither connect to Redis nor build a process group, and would wait forever.

    The default limit of 1,024 exists for select(), which we do not use; a learner needs tens of descriptors per process group,
    and gloo aborts a process without free ones.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard != resource.RLIM_INFINITY and hard < LEAST:
        raise ConfigError(f"{hard} file descriptors are too few for a process of a run, which needs {LEAST}; {RAISE_IT}")
    out_s = 0.0

    def check() -> None:
        nonlocal out_s
        out_s = 0.0 if _is_one_free() else out_s + BEAT_S
        if out_s >= within_s:
            raise _too_few(f"none was free for {within_s:g} s")

    with watched(check):
        yield


_counting = Lock()
_num_failed, _failed_at = 0, -math.inf
"""Attempts in a row that failed for want of descriptors, and when the last one did."""


@contextmanager
def many_descriptors() -> Generator[None]:
    """Use it around what opens tens of descriptors at once, and is tried again when it fails: if it fails for want of them
    `IN_A_ROW` times in a row, the process ends (ServiceStopped), because it would try forever. Uses at the same time are one.
    """
    global _num_failed, _failed_at
    started = time.monotonic()
    try:
        yield
    except Exception as error:
        with _counting:
            if os.strerror(errno.EMFILE) in str(error) and started > _failed_at:
                _num_failed, _failed_at = _num_failed + 1, time.monotonic()
        if _num_failed >= IN_A_ROW:
            end_process(_too_few(f"{IN_A_ROW} process groups in a row could not be built: {str(error).partition(chr(10))[0]}"))
        raise
    _num_failed = 0


def _too_few(symptom: str) -> ServiceStopped:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return ServiceStopped(f"{limit} file descriptors are too few for this process ({symptom}); {RAISE_IT}")


def descriptors_are_scarce() -> bool:
    """Whether more than half of the descriptors are in use. False if the system does not tell."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if not _is_one_free():
        return True
    try:
        return soft != resource.RLIM_INFINITY and 2 * sum(1 for _ in Path("/proc/self/fd").iterdir()) > soft
    except OSError:
        return False


def _is_one_free() -> bool:
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        return error.errno not in (errno.EMFILE, errno.ENFILE)
    return True
