"""Fault injection: named points at which a process can be killed or get an OSError, between any two changes of state.

    define("archive.written")                        at import: registers the name for the coverage report
    failpoint("archive.written")                     the point; does nothing unless armed
    ASYNC_RL_FAILPOINT=archive.written:3             SIGKILL on the third pass
    ASYNC_RL_FAILPOINT=archive.written:3=ENOSPC      OSError on the third pass
    ASYNC_RL_FAILPOINT=archive.written:3-5=EIO       OSError on the third, fourth and fifth pass
    ASYNC_RL_FAILPOINT_LOG=points.log                logs which points were passed, and where it died

Separate several orders by commas.
"""

from __future__ import annotations

import errno
import os
import re
import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from async_rl.errors import ConfigError

ORDERS = "ASYNC_RL_FAILPOINT"
LOG = "ASYNC_RL_FAILPOINT_LOG"

_known: set[str] = set()
_armed: _Armed | None = None


def define(*names: str) -> None:
    """Register the points of a module."""
    _known.update(names)


def known() -> frozenset[str]:
    """Every point of the modules imported so far."""
    return frozenset(_known)


def failpoint(name: str) -> None:
    """Die or raise OSError here if so ordered. Costs one comparison when nothing is armed."""
    if _armed is not None:
        _armed.reach(name)


def arm(orders: str, log: Path | None = None) -> None:
    """Arm `name:count[=ERROR][,...]`, replacing earlier orders, and log passed points to `log`. "" disarms."""
    global _armed
    wanted = [_order(text.strip()) for text in orders.split(",") if text.strip()]
    _armed = _Armed(wanted, log) if wanted or log is not None else None


def arm_from(environ: Mapping[str, str]) -> None:
    """Arm what the environment orders; call it in entry points. Names of other programs' points are ignored."""
    log = environ.get(LOG, "")
    arm(environ.get(ORDERS, ""), Path(log) if log else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Order:
    name: str
    first: int
    last: int
    error: int | None
    """errno of the OSError; None: SIGKILL."""


def _order(text: str) -> _Order:
    match = re.fullmatch(r"([\w.-]+)(?::([1-9]\d*)(?:-([1-9]\d*))?)?(?:=(\w+))?", text)
    error = getattr(errno, match[4], None) if match is not None and match[4] else None
    if match is None or (match[4] and error is None):
        raise ConfigError(f"{ORDERS}: {text!r} is not name:count, as in commit.after:3, or name:count=ERROR, as in =ENOSPC")
    first = int(match[2]) if match[2] else 1
    return _Order(name=match[1], first=first, last=int(match[3]) if match[3] else first, error=error)


class _Armed:
    def __init__(self, wanted: Sequence[_Order], log: Path | None) -> None:
        self._wanted = wanted
        # One short append per line, so that it is complete even if the process dies right after it.
        self._log = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600) if log is not None else None
        self._reached: Counter[str] = Counter()

    def reach(self, name: str) -> None:
        if name not in _known:  # the coverage report would not know about it
            raise LookupError(f"failpoint {name!r} was never defined")
        self._reached[name] += 1
        times = self._reached[name]
        if times == 1:
            self._note("passed", name)
        for order in self._wanted:
            if order.name == name and order.first <= times <= order.last:
                if order.error is not None:
                    raise OSError(order.error, os.strerror(order.error))
                self._note("died", name)
                _die()

    def _note(self, what: str, name: str) -> None:
        if self._log is not None:
            os.write(self._log, f"{what} {name} {os.getpid()}\n".encode())


def _die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable after SIGKILL")
