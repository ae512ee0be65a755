"""The exception family. Each class has an exit code; its message is one sentence for the user.

AsyncRLError (1)
├── ConfigError (2)              the configuration is wrong; nothing was started
├── LearnerAlreadyRunning (3)    another learner holds the run
├── FenceLost (4)                a newer learner took over while this one was suspended
├── FleetMismatch (5)            this process disagrees with the run about model, tokenizer or sampling
├── BufferUnreachable (6)        Redis does not answer
├── Diverged (7)                 loss or gradients are no longer finite
├── FailureBudgetSpent (8)       too many episodes failed in a row
├── WireError (9)                a weight push failed
├── CheckpointError (10)         checkpoints are damaged or of another model; or they or the journal cannot be written
├── ServiceStopped (11)          a service or thread that runs as long as its process ended or hangs
├── RestartLimit (12)            a child process exceeded its restarts
├── IntruderPackage (13)         another package named `buffer` or `learner` shadows ours
├── ServerRewound (14)           Redis lost writes that it had confirmed; the learner restarts from its checkpoint
├── EnvironmentBlocked (15)      environment code blocked a worker's event loop; the worker is restarted
└── UnfitMachine (16)            `async-rl doctor` has found something that a run cannot live with
"""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import ClassVar


class AsyncRLError(Exception):
    exit_code: ClassVar[int] = 1


class ConfigError(AsyncRLError):
    exit_code = 2


class LearnerAlreadyRunning(AsyncRLError):
    exit_code = 3


class FenceLost(AsyncRLError):
    exit_code = 4


class FleetMismatch(AsyncRLError):
    exit_code = 5


class BufferUnreachable(AsyncRLError):
    exit_code = 6


class Diverged(AsyncRLError):
    exit_code = 7


class FailureBudgetSpent(AsyncRLError):
    exit_code = 8


class WireError(AsyncRLError):
    exit_code = 9


class CheckpointError(AsyncRLError):
    exit_code = 10


class ServiceStopped(AsyncRLError):
    exit_code = 11


class RestartLimit(AsyncRLError):
    exit_code = 12


class IntruderPackage(AsyncRLError):
    exit_code = 13


class ServerRewound(AsyncRLError):
    exit_code = 14


class EnvironmentBlocked(AsyncRLError):
    exit_code = 15


class UnfitMachine(AsyncRLError):
    exit_code = 16


def meaning_of(exit_code: int) -> str:
    """The name of the error class with this exit code; "" if there is none."""
    kinds = {kind.exit_code: kind.__name__ for kind in AsyncRLError.__subclasses__() if "exit_code" in vars(kind)}
    return kinds.get(exit_code, "")


def find_async_rl_error(error: BaseException) -> AsyncRLError | None:
    """The error itself, or the first AsyncRLError inside an exception group; None if there is none."""
    if isinstance(error, AsyncRLError):
        return error
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
            if found := find_async_rl_error(inner):  # pyright: ignore[reportUnknownArgumentType]
                return found
    return None


@contextmanager
def naming_setting(key: str) -> Generator[None, None, None]:
    """Prefix the ConfigErrors raised inside with the setting that they are about."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error


@contextmanager
def boundary(program: str) -> Generator[None, None, None]:
    """The outermost block of a process: turns an AsyncRLError into one sentence on stderr and its exit code.

    Any other exception is a bug and keeps its traceback.
    """
    try:
        yield
        _flush_output()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except BrokenPipeError:
        if not _drop_unread_output():
            raise
        raise SystemExit(141) from None  # as a shell reports a program that SIGPIPE ended
    except (AsyncRLError, BaseExceptionGroup) as error:
        ours = find_async_rl_error(error)
        if ours is None:
            raise
        with suppress(OSError):  # a log on a full disk is no reason to end with another exit code
            print(f"{program}: {ours}", file=sys.stderr)
        raise SystemExit(ours.exit_code) from None


def _flush_output() -> None:
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError:  # a log on a full disk is no reason to end with another exit code
        pass


def _drop_unread_output() -> bool:
    """Whether the reader of stdout is gone, as with `| head`; what was not written yet is dropped then."""
    stdout, state = sys.stdout.fileno(), select.poll()
    state.register(stdout, 0)
    if not any(event & select.POLLERR for _, event in state.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), stdout)
    return True
