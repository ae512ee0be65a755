"""Unexpected replies: what a run's keys hold is untrusted, and content that cannot be parsed becomes one clear error."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from redis.exceptions import ResponseError

from async_rl.errors import AsyncRLError
from buffer.server.transient_errors import code_of

_OTHER_CLIENT = "has another client written to this run's keys? `async-rl buffer audit` lists what does not belong"


class UnexpectedReply(AsyncRLError):
    """The server refused a command for an unknown reason, or holds content that this code has not written."""


@contextmanager
def reading(name: str) -> Generator[None]:
    """Turn errors in the block, which parses the run's key `name`, into UnexpectedReply."""
    try:
        yield
    except (ValueError, TypeError, LookupError, OverflowError, AttributeError) as error:
        raise UnexpectedReply(f"the run's key {name!r} cannot be parsed ({type(error).__name__}): {_OTHER_CLIENT}") from error


def refused(command: str, error: ResponseError) -> UnexpectedReply:
    """Return the error for a refused command. Redis' text may quote a payload, so only its code is passed on."""
    kind = code_of(error)[:40]
    return UnexpectedReply(f"Redis refused {command!r} ({kind if kind.isalpha() else 'an error'}): {_OTHER_CLIENT}")


def wrong_type(key: str, found: str, expected: str) -> UnexpectedReply:
    return UnexpectedReply(f"the key {key} is a {found} and should be a {expected}: {_OTHER_CLIENT}")
