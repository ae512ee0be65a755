"""The only place where services and child processes are started, watched and stopped."""

from async_rl.supervision.liveness.pauses import keep_pauses_short
from async_rl.supervision.liveness.service_thread import ServiceThread
from async_rl.supervision.liveness.sign_of_life import signs_of_life
from async_rl.supervision.liveness.watchdog import LoopStall, end_process, ends_after, stall_watchdog, watched
from async_rl.supervision.liveness.whereabouts import CodeLocation, frame_of_thread, is_importing, is_in_package, location_of
from async_rl.supervision.liveness.work import work_limit, working
from async_rl.supervision.processes.children import Child, ChildSpec, FatalExit, how_it_ended
from async_rl.supervision.processes.orphans import adopt_orphans, die_with_parent
from async_rl.supervision.processes.piped_process import PipedProcess, ProcessEnded
from async_rl.supervision.processes.process_tree import (
    children_of,
    children_of_this_thread,
    descendants_of,
    kill_each,
    kill_tree,
)
from async_rl.supervision.processes.restarts import FATAL_EXIT_CODES, Finish, GiveUp, Restart, RestartPolicy, decide
from async_rl.supervision.processes.signals import Drain, drain_flag, drain_on_signals
from async_rl.supervision.services import forever, run_with

__all__ = [
    "FATAL_EXIT_CODES",
    "Child",
    "ChildSpec",
    "CodeLocation",
    "Drain",
    "FatalExit",
    "Finish",
    "GiveUp",
    "LoopStall",
    "PipedProcess",
    "ProcessEnded",
    "Restart",
    "RestartPolicy",
    "ServiceThread",
    "adopt_orphans",
    "children_of",
    "children_of_this_thread",
    "decide",
    "descendants_of",
    "die_with_parent",
    "drain_flag",
    "drain_on_signals",
    "end_process",
    "ends_after",
    "forever",
    "frame_of_thread",
    "how_it_ended",
    "is_importing",
    "is_in_package",
    "keep_pauses_short",
    "kill_each",
    "kill_tree",
    "location_of",
    "run_with",
    "signs_of_life",
    "stall_watchdog",
    "watched",
    "work_limit",
    "working",
]
