"""Short interpreter pauses for processes with an event loop and a compute thread."""

from __future__ import annotations

import gc
import sys

SWITCH_S = 0.0005
"""Switch interval: how long a thread that wakes up waits for the GIL while the other computes. A dozen wake-ups lie between the
end of one group and the start of the next; with Python's default of 5 ms the engine would be half empty meanwhile."""


def keep_pauses_short() -> None:
    """Lower the switch interval and exclude existing objects from garbage collection. Call it after imports and start-up: a
    full collection over half a million objects of libraries would pause both threads for 0.3 s.
    """
    sys.setswitchinterval(SWITCH_S)
    gc.collect()
    gc.freeze()
