"""The exception family. Each kind is one sentence to a person and one exit code to a supervisor.

AsyncRLError (1)
├── ConfigError (2)              the configuration is wrong; nothing was started
├── LearnerAlreadyRunning (3)    another learner holds the run
├── FenceLost (4)                a newer learner took over while this one slept
├── FleetMismatch (5)            this process disagrees with the run about model, tokenizer or sampling
├── BufferUnreachable (6)        no Redis answers
├── Diverged (7)                 loss or gradients stopped being finite
├── FailureBudgetSpent (8)       too many episodes failed in a row
├── WireError (9)                a weight push broke
├── CheckpointError (10)         checkpoints are damaged or another model's; they or the journal cannot be written
├── ServiceStopped (11)          a part that should run for ever ended
├── RestartLimit (12)            a child process keeps dying
├── IntruderPackage (13)         somebody else's `buffer` or `learner` shadows ours
├── ServerRewound (14)           Redis has lost what it once confirmed; the learner starts again from its checkpoint
└── EnvironmentBlocked (15)      code of an environment holds a worker's event loop: the worker is replaced
"""

from __future__ import annotations

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


def meaning_of(exit_code: int) -> str:
    """The kind of error that ends a process with this code; empty where it is none of ours."""
    kinds = {kind.exit_code: kind.__name__ for kind in AsyncRLError.__subclasses__() if "exit_code" in vars(kind)}
    return kinds.get(exit_code, "")


def first_of_ours(error: BaseException) -> AsyncRLError | None:
    """The first of our errors inside an exception group, or the error itself."""
    if isinstance(error, AsyncRLError):
        return error
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
            if found := first_of_ours(inner):  # pyright: ignore[reportUnknownArgumentType]
                return found
    return None


@contextmanager
def about(key: str) -> Generator[None, None, None]:
    """What is wrong inside is said of a setting: whoever reads a folder need not know which one named it."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error


@contextmanager
def boundary(program: str) -> Generator[None, None, None]:
    """The edge of a process: one of our errors becomes one sentence on stderr and its exit code.

    Anything else is a bug and keeps its traceback.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except (AsyncRLError, BaseExceptionGroup) as error:
        ours = first_of_ours(error)
        if ours is None:
            raise
        with suppress(OSError):  # a log on a full disk is no reason to end with another exit code
            print(f"{program}: {ours}", file=sys.stderr)
        raise SystemExit(ours.exit_code) from None
