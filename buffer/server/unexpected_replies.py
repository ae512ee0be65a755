"""Unexpected replies: what a run's keys hold is untrusted, and content that cannot be parsed becomes one clear error."""

from __future__ import annotations

import re
from collections.abc import Generator
from contextlib import contextmanager

from redis.exceptions import ResponseError

from async_rl.errors import AsyncRLError

_OTHER_CLIENT = "has another client written to this run's keys? `async-rl buffer audit` lists what does not belong"

_IN_SCRIPT = re.compile(r"^Error running script \(call to \w+\): @user_script: ?\d+: ")
"""What Redis 6 says before the code."""


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
    kind = _IN_SCRIPT.sub("", str(error)).split(" ", 1)[0][:40]
    return UnexpectedReply(f"Redis refused {command!r} ({kind if kind.isalpha() else 'an error'}): {_OTHER_CLIENT}")


def wrong_type(key: str, found: str, expected: str) -> UnexpectedReply:
    return UnexpectedReply(f"the key {key} is a {found} and should be a {expected}: {_OTHER_CLIENT}")
