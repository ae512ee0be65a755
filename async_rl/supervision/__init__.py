"""The only place where services and child processes are started, watched and stopped."""

from async_rl.supervision.children import Child, ChildSpec, FatalExit
from async_rl.supervision.orphans import die_with_parent
from async_rl.supervision.restarts import FATAL_EXIT_CODES, Finish, GiveUp, Restart, RestartPolicy, decide
from async_rl.supervision.services import forever, run_with
from async_rl.supervision.signals import drain_on_signals
from async_rl.supervision.watchdog import stall_watchdog

__all__ = [
    "FATAL_EXIT_CODES",
    "Child",
    "ChildSpec",
    "FatalExit",
    "Finish",
    "GiveUp",
    "Restart",
    "RestartPolicy",
    "decide",
    "die_with_parent",
    "drain_on_signals",
    "forever",
    "run_with",
    "stall_watchdog",
]
