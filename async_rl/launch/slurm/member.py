"""One process of a fleet, inside its job: python -P -m async_rl.launch.slurm.member learner|worker|evaluator @ config.yaml

It starts the process as `async-rl run` does and restarts it after crashes. USR1 (the job's time is nearly over) and TERM (it
was asked to end, or another job gets its nodes) let the process drain; the exit code tells the script which of them it was.
Workers and evaluator also end when the queue has no learner job of the run any more.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import structlog

from async_rl.config import Config
from async_rl.config.loading import load_file
from async_rl.durable.private_files import keep_files_private
from async_rl.errors import ConfigError, boundary
from async_rl.launch import fleet_plan
from async_rl.launch.fleet_plan import MemberPlan
from async_rl.launch.member_spec import member_spec
from async_rl.launch.own_address import own_address
from async_rl.launch.slurm import fleet, queue
from async_rl.launch.slurm.learner_watch import LearnerWatch
from async_rl.launch.slurm.scripts import CONTINUES, PREEMPTED, kind_of
from async_rl.supervision import Child, FatalExit, exit_code_of
from async_rl.telemetry import configure_logs

log = structlog.get_logger("async_rl.fleet")

PATIENCE_S = 600.0
"""Seconds for which a learner at its end asks a controller that does not answer."""


class SlurmMember:
    """Supervises the process until it ends, fails for good, or a signal or the loss of the learner lets it drain.

    waits for:    the end of the process
    unblocked by: its exit; USR1 or TERM from Slurm; the end of the run's last learner job
    """

    def __init__(self, child: Child, watch: LearnerWatch | None) -> None:
        """`watch`: None for the learner itself."""
        self._child, self._watch = child, watch
        self.is_asked_to_end = False
        self.is_out_of_time = False

    async def run(self, *, leaves: bool) -> int:
        """Return an exit code. `leaves`: the process was asked to end before it began."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR1, self._out_of_time)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._asked_to_end)
        if leaves:
            self.is_asked_to_end = True
            return 0
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(self._end_with_learner())
            code = await self._supervise()
            watching.cancel()
        return code

    async def _supervise(self) -> int:
        try:
            status = await self._child.supervise()
        except FatalExit as fatal:
            log.error(str(fatal))
            return fatal.exit_code
        if self.is_asked_to_end or not self.is_out_of_time or (self._watch is not None and await self._watch.is_gone()):
            return exit_code_of(status)
        return CONTINUES

    async def _end_with_learner(self) -> None:
        if self._watch is not None:
            await self._watch.until_gone()
            self._asked_to_end()

    def _out_of_time(self) -> None:
        self.is_out_of_time = True
        self._child.terminate()

    def _asked_to_end(self) -> None:
        self.is_asked_to_end = True
        self._child.terminate()


def plan_of(config: Config, kind: str, environ: Mapping[str, str]) -> MemberPlan:
    """What this task of this job is."""
    if kind == "learner":
        nodes = int(environ["SLURM_JOB_NUM_NODES"])  # launch.learner_nodes, or as many as there were
        return fleet_plan.learner(config, has_gpus=False, nodes=nodes).members[int(environ["SLURM_PROCID"])]
    if kind == "worker":
        return fleet_plan.worker(config, int(environ["SLURM_ARRAY_TASK_ID"]), has_gpus=False).members[0]
    return fleet_plan.evaluator(config, has_gpus=False).members[0]


def end_run(config: Config, own_job: str, *, is_out_of_time: bool) -> None:
    """After the learner's end: end what is left of the run in the queue, unless another job of its chain goes on. If Slurm does
    not answer, ask again for PATIENCE_S; what is left then ends by itself."""
    deadline, pause_s = time.monotonic() + PATIENCE_S, 1.0
    while True:
        try:
            _end_run(config, own_job, is_out_of_time=is_out_of_time)
            return
        except ConfigError as error:
            if time.monotonic() > deadline:
                log.error(f"what is left of the run in Slurm's queue could not be ended: {error}; workers see it themselves")
                return
            log.warning(f"what is left of the run in Slurm's queue could not be ended: {error}; asked again in {pause_s:g} s")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 30.0)


def _end_run(config: Config, own_job: str, *, is_out_of_time: bool) -> None:
    others = [job for job in queue.jobs_in(config.run_folder) if job.id != own_job]
    if is_out_of_time:
        if any(kind_of(config, job.name) == "learner" and not job.leaves for job in others):
            return
        log.warning(
            "the time of the last learner job is over (launch.slurm.learner_jobs); `async-rl launch slurm` with the same "
            "run.name resumes the run"
        )
    fleet.end(others)


def main() -> int:
    kind, _, path = sys.argv[1:]
    keep_files_private()
    config = load_file(Config, Path(path))
    configure_logs("fleet", run_folder=config.run_folder)
    plan = plan_of(config, kind, os.environ)
    spec = member_spec(
        plan, config, Path(path), os.environ, address=own_address(config), policy=config.supervision.policy, log=None
    )
    job = os.environ["SLURM_JOB_ID"]
    is_queued_again = "SLURM_RESTART_COUNT" in os.environ
    watch = LearnerWatch(config, knows_learner=is_queued_again) if kind != "learner" else None
    member = SlurmMember(Child(spec, on_start=lambda _name, _pid: None), watch)
    code = asyncio.run(member.run(leaves=_answer(queue.is_leaving, job)))
    if (member.is_asked_to_end or member.is_out_of_time) and _answer(queue.is_preempted, job):
        return PREEMPTED
    if plan.name == "learner" and not member.is_asked_to_end:
        end_run(config, job, is_out_of_time=member.is_out_of_time)
    return code


def _answer(ask: Callable[[str], bool], job: str) -> bool:
    """What Slurm says of this job; False if it does not answer."""
    try:
        return ask(job)
    except ConfigError as error:
        log.warning(str(error))
        return False


if __name__ == "__main__":
    with boundary("async-rl launch slurm"):
        sys.exit(main())
