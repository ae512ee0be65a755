"""The only place where services and child processes are started, watched and stopped."""

from async_rl.supervision.children import Child, ChildSpec, FatalExit, how_it_ended
from async_rl.supervision.orphans import adopt_orphans, die_with_parent
from async_rl.supervision.pauses import keep_pauses_short
from async_rl.supervision.piped_process import PipedProcess, ProcessEnded
from async_rl.supervision.process_tree import children_of, children_of_this_thread, descendants_of, kill_each, kill_tree
from async_rl.supervision.restarts import FATAL_EXIT_CODES, Finish, GiveUp, Restart, RestartPolicy, decide
from async_rl.supervision.services import forever, run_with
from async_rl.supervision.signals import drain_flag, drain_on_signals
from async_rl.supervision.watchdog import stall_watchdog

__all__ = [
    "FATAL_EXIT_CODES",
    "Child",
    "ChildSpec",
    "FatalExit",
    "Finish",
    "GiveUp",
    "PipedProcess",
    "ProcessEnded",
    "Restart",
    "RestartPolicy",
    "adopt_orphans",
    "children_of",
    "children_of_this_thread",
    "decide",
    "descendants_of",
    "die_with_parent",
    "drain_flag",
    "drain_on_signals",
    "forever",
    "how_it_ended",
    "keep_pauses_short",
    "kill_each",
    "kill_tree",
    "run_with",
    "stall_watchdog",
]
