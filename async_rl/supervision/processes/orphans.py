"""Parent and child lifetimes (Linux): die with the parent, adopt orphaned descendants."""

from __future__ import annotations

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent dies. Does nothing elsewhere than on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))


def adopt_orphans() -> None:
    """Become the parent of orphaned descendants, so that `descendants_of` finds them. Does nothing elsewhere than on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
