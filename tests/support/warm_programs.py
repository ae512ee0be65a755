"""`async-rl` and the roles that it starts as forks of a process that has imported torch and Megatron.

    forkserver ── fork ──▶ async-rl run ── fork ──▶ learner        importing takes five seconds of CPU in each process
                                        ── fork ──▶ worker         that is executed, and a whole run has four

They are processes as in a real run: each has its own id, parent, session, environment, descriptors and exit code. Only where
Python would execute itself, to run one of our modules, the fork runs the module without it.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import runpy
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

from async_rl.cli.main import main
from async_rl.supervision.liveness.leaving import leave_at_once
from tests.support.warm_processes import CONTEXT

ASYNC_RL = Path(sys.executable).with_name("async-rl")
_ITSELF = [sys.executable, "-P", "-m"]
"""How a command begins that a fork can do."""


def start(
    command: Iterable[object], *, folder: Path, environment: Mapping[str, str], output: Path, errors: Path, warm: bool
) -> BaseProcess:
    """Start `async-rl` or a module of ours in a folder; what it prints goes to two files. Not `warm`: execute it."""
    for file in (output, errors):
        file.touch()
    process = CONTEXT.Process(
        target=_play,
        args=(list(map(str, command)), str(folder), dict(environment), str(output), str(errors), _umask(), warm),
    )
    process.start()
    return process


def _umask() -> int:
    os.umask(mask := os.umask(0o077))
    return mask


def _play(
    command: list[str], folder: str, environment: dict[str, str], output: str, errors: str, mask: int, warm: bool
) -> NoReturn:
    os.umask(mask)
    streams = os.open(os.devnull, os.O_RDONLY), *(os.open(file, os.O_WRONLY | os.O_APPEND) for file in (output, errors))
    _redirect(streams, keep=())
    os.chdir(folder)
    if not warm:
        os.execve(command[0], command, environment)
    for strict in [each for each in warnings.filters if each[0] == "error"]:  # a user's Python is not
        warnings.filters.remove(strict)
    vars(subprocess)["_fork_exec"] = partial(_fork_exec, vars(subprocess)["_fork_exec"])
    vars(os)["execve"] = partial(_execve, os.execve)
    if command[:3] == _ITSELF:
        _run_module(command, environment)
    _show_command([sys.executable, *command])
    _run(main, ["async-rl", *command[1:]], environment)


def _execve(execute: Callable[..., NoReturn], path: str, command: list[str], environment: Mapping[str, str]) -> NoReturn:
    """As `os.execve`."""
    if command[:3] != _ITSELF:
        execute(path, command, environment)
    _run_module(command, environment)


def _fork_exec(execute: Callable[..., int], command: Sequence[str | bytes], *more: Any) -> int:
    """As `_posixsubprocess.fork_exec`, which `Popen` and asyncio call."""
    _, _, keep, folder, environment, stdin, _, _, stdout, _, stderr, _, errors, _, new_session, *_, prepare, _ = more
    words = [os.fsdecode(word) for word in command]
    if words[:3] != _ITSELF or not _is_alone():
        return execute(command, *more)
    sys.stdout.flush()
    if pid := os.fork():
        return pid
    with leave_at_once():
        _forget_handlers()
        _redirect((stdin, stdout, stderr), keep=set(keep) - {errors})
        if folder is not None:
            os.chdir(folder)
        if new_session:
            os.setsid()
        if prepare is not None:
            prepare()
        given = os.environ if environment is None else dict(os.fsdecode(pair).split("=", 1) for pair in environment)
        _run_module(words, given)
    raise AssertionError("`leave_at_once` returns")


def _forget_handlers() -> None:
    """Let signals end this process, which is another than the one that handled them."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _is_alone() -> bool:
    """Whether no other thread may hold a lock, which would stay locked in a fork. Those that wait hold none."""
    return all(
        thread is threading.main_thread() or thread.name == "watchdog" or thread.name.startswith("asyncio-waitpid-")
        for thread in threading.enumerate()
    )


def _redirect(streams: Sequence[int], *, keep: Collection[int]) -> None:
    """Take the streams for the standard ones, where they are not -1, and close all other descriptors but those to keep."""
    for number, stream in enumerate(streams):
        if stream != -1:
            os.dup2(stream, number)
    last = 2
    for number in (*sorted(keep), os.sysconf("SC_OPEN_MAX")):
        os.closerange(last + 1, number)
        last = number


def _run_module(command: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    module, *arguments = command[len(_ITSELF) :]
    _show_command(command)
    Path("/proc/self/comm").write_text(module)
    for name in (module, f"{module}.__main__"):
        if not hasattr(sys.modules.get(name), "__path__"):
            sys.modules.pop(name, None)  # it is imported, and would be run a second time
    _run(lambda: runpy.run_module(module, run_name="__main__", alter_sys=True), [module, *arguments], environment)


def _show_command(words: Sequence[str]) -> None:
    """Write them over the command line of the forkserver, where /proc/self/cmdline finds them."""
    place = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(place[45]), int(place[46])
    line = "\0".join(words).encode()[: end - start - 1]
    ctypes.memmove(start, line.ljust(end - start, b"\0"), end - start)


def _run(code: Callable[[], object], words: list[str], environment: Mapping[str, str]) -> NoReturn:
    """Run it as a Python that was just executed would, to the end of this process."""
    gc.freeze()  # what the parent left is never collected: its descriptors have new owners
    given = dict(environment)
    os.environ.clear()
    os.environ.update(given)
    _forget_handlers()
    asyncio._set_running_loop(None)
    asyncio.set_event_loop_policy(None)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    sys.argv = words
    with leave_at_once():
        code()
    raise AssertionError("`leave_at_once` returns")
