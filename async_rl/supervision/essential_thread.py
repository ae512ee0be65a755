"""Threads that a process is of no use without."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable

from async_rl.errors import ServiceStopped


def start_essential_thread(run: Callable[[], None], *, name: str) -> threading.Thread:
    """If `run` raises, the process ends with ServiceStopped's code, naming the thread: its supervisor starts another."""

    def guarded() -> None:
        try:
            run()
        except BaseException:
            traceback.print_exc()
            print(f"the thread {name!r} has died, and this process ends with it", file=sys.stderr, flush=True)
            os._exit(ServiceStopped.exit_code)

    thread = threading.Thread(target=guarded, name=name, daemon=True)
    thread.start()
    return thread
