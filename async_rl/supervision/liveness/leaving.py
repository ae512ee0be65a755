"""Ends a process whose libraries have threads that may hang."""

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
    """End the process with the block: run exit handlers, but skip the interpreter's finalization.

    A thread that hangs in torch, waiting for a worker that is gone, cannot be stopped. If it returned during finalization, C++
    code would abort the process; if it did not, the process would wait for it forever.
    """
    code = 0
    try:
        yield
    except SystemExit as error:
        code = _status(error.code)
    except BaseException:
        traceback.print_exc()
        code = 1
    # As the interpreter does: join non-daemon threads, run exit handlers.
    threading._shutdown()  # pyright: ignore
    atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # a log on a full disk must not change the exit code
            stream.flush()
    os._exit(code)


def _status(code: object) -> int:
    """The exit status of SystemExit.code, as the interpreter interprets it."""
    if code is None or isinstance(code, int):
        return code if code is not None else 0
    print(code, file=sys.stderr)
    return 1
