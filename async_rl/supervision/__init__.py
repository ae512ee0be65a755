"""The only place where services and child processes are started, watched and stopped."""

from async_rl.supervision.liveness.pauses import keep_pauses_short as keep_pauses_short
from async_rl.supervision.liveness.service_thread import ServiceThread as ServiceThread
from async_rl.supervision.liveness.sign_of_life import signs_of_life as signs_of_life
from async_rl.supervision.liveness.watchdog import LoopStall as LoopStall
from async_rl.supervision.liveness.watchdog import ends_after as ends_after
from async_rl.supervision.liveness.watchdog import stall_watchdog as stall_watchdog
from async_rl.supervision.liveness.work import work_limit as work_limit
from async_rl.supervision.liveness.work import working as working
from async_rl.supervision.processes.children import PREDECESSOR as PREDECESSOR
from async_rl.supervision.processes.children import Child as Child
from async_rl.supervision.processes.children import ChildSpec as ChildSpec
from async_rl.supervision.processes.orphans import die_with_parent as die_with_parent
from async_rl.supervision.processes.piped_process import PipedProcess as PipedProcess
from async_rl.supervision.processes.piped_process import ProcessEnded as ProcessEnded
from async_rl.supervision.processes.process_tree import children_of as children_of
from async_rl.supervision.processes.process_tree import children_of_this_thread as children_of_this_thread
from async_rl.supervision.processes.process_tree import descendants_of as descendants_of
from async_rl.supervision.processes.process_tree import kill_each as kill_each
from async_rl.supervision.processes.restarting import FatalExit as FatalExit
from async_rl.supervision.processes.restarting import Restarted as Restarted
from async_rl.supervision.processes.restarting import how_it_ended as how_it_ended
from async_rl.supervision.processes.restarts import RestartPolicy as RestartPolicy
from async_rl.supervision.processes.signals import Drain as Drain
from async_rl.supervision.processes.signals import drain_flag as drain_flag
from async_rl.supervision.processes.signals import drain_on_signals as drain_on_signals
from async_rl.supervision.services import run_with as run_with
