"""Maps each verb to its function; async_rl/cli/buffer.py defines their options and help."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from async_rl.cli.grammar import Line
from async_rl.config import Config
from buffer.tools import archive, audit, limits, ls, mix, quarantine, show, stats, tail, users, vacuum, weights
from buffer.tools.open_run import OpenRun

ON_A_RUN: Mapping[str, Callable[[OpenRun, Line], Awaitable[int]]] = {
    "stats": stats.stats,
    "audit": audit.audit,
    "ls": ls.ls,
    "show": show.show,
    "tail": tail.tail,
    "quarantine ls": quarantine.ls,
    "quarantine show": quarantine.show,
    "quarantine release": quarantine.release,
    "quarantine forget": quarantine.forget,
    "vacuum": vacuum.vacuum,
    "limits": limits.limits,
    "env ls": mix.ls,
    **dict.fromkeys(("env attach", "env detach", "env weight"), mix.change),
    "weights status": weights.status,
    "weights push": weights.push,
    "weights pin": weights.pin,
    "weights rollback": weights.rollback,
    "users create": users.create,
    "users ls": users.ls,
}

ON_FILES: Mapping[str, Callable[[Config, Line], int]] = {"archive ls": archive.ls, "archive export": archive.export}
"""These need no server."""
