"""Processes of pytest-xdist as forks of the server of warm processes, which all of them use: it imports once for all.

pytest ── starts ──▶ forkserver ── fork ──▶ a process of xdist ── asks the same forkserver ──▶ warm processes
       ── executes ─▶ this program, which asks for the fork, gives it its streams and ends as it does
"""

from __future__ import annotations

import os
import random
import shlex
import sys
import warnings
from collections.abc import Mapping
from multiprocessing.reduction import DupFd
from pathlib import Path
from types import ModuleType
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[2])

from tests.support.warm_processes import CONTEXT, start_server, use_server


def python() -> str:
    """Return a command for xdist to use as its Python; it takes what xdist gives it, `-u -c CODE`."""
    return shlex.join([sys.executable, __file__, start_server()])


def main(address: str, *words: str) -> int | None:
    use_server(address)
    process = CONTEXT.Process(target=_run, args=(words[-1], dict(os.environ), *map(DupFd, range(3))))
    process.start()
    process.join()
    return process.exitcode


def _run(code: str, environment: Mapping[str, str], *streams: Any) -> None:
    for number, stream in enumerate(streams):
        os.dup2(stream.detach(), number)
    sys.stdin = os.fdopen(0, closefd=False)
    os.environ.clear()
    os.environ.update(environment)
    warnings.resetwarnings()  # pytest has its own
    random.seed()
    use_server()
    sys.argv = ["-c"]
    sys.modules["__main__"] = program = ModuleType("__main__")
    exec(code, vars(program))


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
