"""Pure: tells transient errors of a Redis server from permanent ones, and words them for people.

Only the error code is used: the text behind it may quote payloads and is never passed on.
"""

from __future__ import annotations

import re
import ssl
from dataclasses import dataclass
from typing import Final

from redis.exceptions import (
    AskError,
    AuthenticationError,
    BusyLoadingError,
    ClusterDownError,
    MasterDownError,
    MovedError,
    NoPermissionError,
    ReadOnlyError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError


@dataclass(frozen=True, slots=True, kw_only=True)
class TransientError:
    """A state of the server that may pass by itself."""

    what: str
    """Continues the sentence "the Redis at ...": """
    way_out: str
    may_have_moved: bool = False
    """Whether another server may be the right one now."""


NO_ANSWER: Final = TransientError(
    what="does not answer", way_out="is the server running, and is the address right?", may_have_moved=True
)

_ASK_THE_MASTER = "give the address of its master, or of its Sentinels"
_BY_CODE: Final = {
    "LOADING": TransientError(what="is still reading its data", way_out="redis.connect_timeout_s is how long a process waits"),
    "READONLY": TransientError(what="is a read-only replica", way_out=_ASK_THE_MASTER, may_have_moved=True),
    "MASTERDOWN": TransientError(what="is a replica without a master", way_out=_ASK_THE_MASTER, may_have_moved=True),
    "UNBLOCKED": TransientError(what="has become a replica", way_out=_ASK_THE_MASTER, may_have_moved=True),
    "CLUSTERDOWN": TransientError(
        what="belongs to a Cluster that is down", way_out="see CLUSTER INFO on its nodes", may_have_moved=True
    ),
    "MOVED": TransientError(
        what="does not own this run", way_out="write redis+cluster:// if it is a Cluster", may_have_moved=True
    ),
    "ASK": TransientError(what="is giving this run to another node", way_out="finish or undo the resharding"),
    "TRYAGAIN": TransientError(what="is giving this run to another node", way_out="finish or undo the resharding"),
    "NOREPLICAS": TransientError(what="has too few replicas to change anything", way_out="bring its replicas back"),
    "MISCONF": TransientError(what="cannot write to its disk", way_out="free some space there; the run then goes on by itself"),
    "BUSY": TransientError(
        what="is busy with a script of another client", way_out="SCRIPT KILL ends a script that has changed nothing"
    ),
}
_CLASSES: Final[tuple[tuple[type[Exception], str], ...]] = (  # redis-py strips the code from the texts of these
    (BusyLoadingError, "LOADING"),
    (ReadOnlyError, "READONLY"),
    (MasterDownError, "MASTERDOWN"),
    (ClusterDownError, "CLUSTERDOWN"),
    (MovedError, "MOVED"),
    (AskError, "ASK"),
    (TryAgainError, "TRYAGAIN"),
)
_IN_A_TRANSACTION = re.compile(r"Command # \d+ \(.{0,200}?\) of pipeline caused error: (?:\('|\(\")?", re.DOTALL)
"""redis-py's prefix for a command that the server refused to queue; it quotes the command."""
_IN_A_SCRIPT = re.compile(r"(?:ERR )?Error running script .{0,120}?(?:@user_script: ?\d+: )+-?")
"""Redis 6.2's prefix for an error inside a script."""
_BESIDE_A_SCRIPT = "Script attempted to access a non local key in a cluster node"
"""A key that a script reads without declaring it has already moved to another node."""
_NOT_ALLOWED = ("NOPERM", "ACL failure in script", "The user executing the script can't")


def transient_error(error: Exception) -> TransientError | None:
    """Return the transient error that `error` stands for; None for a permanent one."""
    if isinstance(error, ResponseError | BusyLoadingError):
        return _BY_CODE.get(code_of(error))
    if is_refused(error) or is_untrusted(error):
        return None
    if isinstance(error, RedisConnectionError | RedisTimeoutError | TimeoutError | OSError):
        return NO_ANSWER
    return None


def is_forbidden(error: Exception) -> bool:
    """Whether the server's ACL forbids this to our user."""
    return isinstance(error, NoPermissionError) or _without_prefix(error).startswith(_NOT_ALLOWED)


def is_refused(error: Exception) -> bool:
    """Whether the server refuses our user or password."""
    return _is_caused_by(error, AuthenticationError)


def is_untrusted(error: Exception) -> bool:
    """Whether the server's certificate is not trusted."""
    return _is_caused_by(error, ssl.SSLCertVerificationError)


def code_of(error: Exception) -> str:
    """The server's code for an error, which begins its text."""
    for kind, code in _CLASSES:
        if isinstance(error, kind):
            return code
    return "ASK" if _BESIDE_A_SCRIPT in _without_prefix(error)[:200] else _without_prefix(error).partition(" ")[0]


def _without_prefix(error: Exception) -> str:
    text = str(error)
    for wrapping in (_IN_A_TRANSACTION, _IN_A_SCRIPT):
        if wrapped := wrapping.match(text):
            text = text[wrapped.end() :]
    return text


def _is_caused_by(error: BaseException, kind: type[Exception]) -> bool:
    """Whether `error` is caused by a `kind`: redis-py replaces the socket's errors by its own."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, kind):
        found = found.__cause__ if found.__cause__ is not None else found.__context__
    return found is not None
