"""How a process ends that has been in foreign code with threads of its own."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import traceback
from collections.abc import Generator
from contextlib import contextmanager, suppress


@contextmanager
def leave_at_once() -> Generator[None, None, None]:
    """The process ends with the block: with its exit handlers, but without taking the interpreter apart.

    A thread that hangs in torch, waiting for a worker that is gone, cannot be stopped. If it comes back to an interpreter
    that is being taken apart, the C++ around it aborts the process, or the process waits for it for ever.
    """
    code = 0
    try:
        yield
    except SystemExit as error:
        code = _status(error.code)
    except BaseException:
        traceback.print_exc()
        code = 1
    # What the interpreter itself does first: threads that are not daemons end, exit handlers run.
    threading._shutdown()  # pyright: ignore
    atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # a log on a full disk is no reason to end with another exit code
            stream.flush()
    os._exit(code)


def _status(code: object) -> int:
    """As the interpreter understands what SystemExit carries."""
    if code is None or isinstance(code, int):
        return code if code is not None else 0
    print(code, file=sys.stderr)
    return 1
