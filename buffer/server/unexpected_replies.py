"""What stands in a run's keys is somebody else's until it has been understood; if it cannot be, that is one sentence."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from redis.exceptions import ResponseError

from async_rl.errors import AsyncRLError

_SOMEBODY = "has somebody else written to this run's keys? `async-rl buffer audit` tells what does not belong"


class UnexpectedReply(AsyncRLError):
    """The server refused a change for a reason that is not ours, or holds what we have not written."""


@contextmanager
def reading(name: str) -> Generator[None]:
    try:
        yield
    except (ValueError, TypeError, LookupError, OverflowError, AttributeError) as error:
        raise UnexpectedReply(
            f"the run's key {name!r} holds what nobody can read ({type(error).__name__}): {_SOMEBODY}"
        ) from error


def refused(command: str, error: ResponseError) -> UnexpectedReply:
    """The error's own text may quote a payload, so only its kind is passed on."""
    kind = str(error).split(" ", 1)[0][:40]
    return UnexpectedReply(f"Redis refused {command!r} ({kind if kind.isalpha() else 'an error'}): {_SOMEBODY}")


def wrong_type(key: str, found: str, expected: str) -> UnexpectedReply:
    return UnexpectedReply(f"the key {key} is a {found} and should be a {expected}: {_SOMEBODY}")
