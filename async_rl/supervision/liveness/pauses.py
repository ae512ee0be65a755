"""Short pauses, where an event loop lives beside a thread that computes: each would wait long for the other by default."""

from __future__ import annotations

import gc
import sys

SWITCH_S = 0.0005
"""So long a loop that wakes up waits for the interpreter while the other thread computes. Between the end of one group and the
beginning of the next lie a dozen wake-ups; with Python's 5 ms the engine runs half empty meanwhile."""


def keep_pauses_short() -> None:
    """Call it when all is there that lives as long as the process. Collecting garbage then no longer looks through it, half a
    million objects of the imported libraries, for which both threads would stand still for 0.3 s.
    """
    sys.setswitchinterval(SWITCH_S)
    gc.collect()
    gc.freeze()
