"""Maps each verb to its function; async_rl/cli/ defines their options and help."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from async_rl.cli.grammar import CommandLine
from async_rl.config import Config
from buffer.tools import archive, audit, erase, fleet, limits, ls, mix, quarantine, show, stats, tail, users, vacuum, weights
from buffer.tools.open_run import OpenRun

ON_A_RUN: Mapping[str, Callable[[OpenRun, CommandLine], Awaitable[int | None]]] = {
    "buffer stats": stats.stats,
    "buffer audit": audit.audit,
    "buffer ls": ls.ls,
    "buffer show": show.show,
    "buffer tail": tail.tail,
    "buffer quarantine ls": quarantine.ls,
    "buffer quarantine show": quarantine.show,
    "buffer quarantine release": quarantine.release,
    "buffer quarantine forget": quarantine.forget,
    "buffer vacuum": vacuum.vacuum,
    "buffer limits": limits.limits,
    "buffer erase": erase.erase,
    "env ls": mix.ls,
    **dict.fromkeys(("env attach", "env detach", "env weight"), mix.change),
    "weights status": weights.status,
    "weights push": weights.push,
    "weights pin": weights.pin,
    "weights rollback": weights.rollback,
    "fleet ls": fleet.ls,
    "fleet drain": fleet.drain,
    "fleet stop": fleet.stop,
    "buffer users create": users.create,
    "buffer users ls": users.ls,
}

ON_FILES: Mapping[str, Callable[[Config, CommandLine], int | None]] = {
    "buffer archive ls": archive.ls,
    "buffer archive export": archive.export,
}
"""These need no server."""
