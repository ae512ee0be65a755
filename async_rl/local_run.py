"""`async-rl run` and `train`: one run on one machine. Starts its processes, keeps them alive, and ends them in order.

buffer serve ◀── worker 0 … n        the learner is the run's finite clock: when it ends, workers stop,
      ▲────────── learner            then the buffer, and the summary is written
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import shutil
import signal
import sys
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import structlog

from async_rl.commands import WORKER_INDEX, Role, command, computes_on_cpu, environment
from async_rl.config import Config
from async_rl.config_files import to_yaml
from async_rl.errors import ConfigError
from async_rl.eval_verbs import SCHEDULED
from async_rl.private_files import keep_files_private, make_private_folder
from async_rl.supervision import Child, ChildSpec, FatalExit, drain_on_signals
from async_rl.training_config import AnyRun, TrainingConfig

log = structlog.get_logger("async_rl.run")

CHECKPOINT_GRACE_S = 60.0
"""Beyond `worker.drain_s`: what writing a last checkpoint may take before a drain turns into a kill."""

LOG_TAIL = 30


@contextmanager
def sole_run(config: AnyRun) -> Generator[None]:
    """Inside, nobody else on this machine runs it: two supervisors would fight over one folder."""
    keep_files_private()
    make_private_folder(config.run_folder)
    with (config.run_folder / "run.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"run {config.run.name!r} is going on already, in {config.run_folder}; stop it, or choose another run.name"
            ) from None
        for left in config.run_folder.glob("engines-*"):  # by workers that were killed
            shutil.rmtree(left, ignore_errors=True)
        yield


def prepare_folder(config: AnyRun) -> Path:
    """Make the run's folder and write the resolved configuration there; every process of the run reads that file."""
    folder = config.run_folder
    make_private_folder(folder)
    _write_whole(folder / "config.yaml", to_yaml(config.seen_from_anywhere()))
    return folder / "config.yaml"


async def run(config: Config, inherited: Mapping[str, str]) -> int:
    """The exit code of the run: 0 when the learner finished or everything drained, else that of what broke it."""
    stop = drain_on_signals()
    return await LocalRun(specs(config, inherited), config.run_folder, config.worker.drain_s + CHECKPOINT_GRACE_S).run(stop)


async def train(config: TrainingConfig, inherited: Mapping[str, str]) -> int:
    """The same of a run that has no workers: its learner reads a table."""
    stop = drain_on_signals()
    spec = _learner("learner.training", config, environment(config, inherited))
    return await LocalRun([spec], config.run_folder, CHECKPOINT_GRACE_S).run(stop)


def specs(config: Config, inherited: Mapping[str, str]) -> list[ChildSpec]:
    """The run's processes, in the order in which they start."""
    args = ["@", str(config.run_folder / "config.yaml")]
    logs = config.run_folder / "logs"
    shared = environment(config, inherited)
    server = ChildSpec(name="buffer", command=command("buffer", ["serve", *args]), environment=shared, log=logs / "buffer.log")
    workers = [
        ChildSpec(
            name=f"worker-{index}",
            command=command("rollout_workers", args),
            environment=shared if computes_on_cpu(config) else {**shared, WORKER_INDEX: str(index)},
            log=logs / f"worker-{index}.log",
        )
        for index in range(config.worker.processes)
    ]
    evaluator = ChildSpec(
        name="evaluator",
        command=command("rollout_workers.evaluation", [SCHEDULED, *args]),
        environment=shared if computes_on_cpu(config) else {**shared, WORKER_INDEX: str(config.worker.processes)},
        log=logs / "evaluator.log",
    )
    return [
        *([] if config.redis.url else [server]),
        _learner("learner", config, shared),
        *workers,
        *([evaluator] if config.evaluation.every else []),
    ]


def _learner(role: Role, config: AnyRun, shared: Mapping[str, str]) -> ChildSpec:
    ranks = config.learner.parallel.ranks
    return ChildSpec(
        name="learner",
        command=command(role, ["@", str(config.run_folder / "config.yaml")], ranks=ranks),
        environment=shared,
        log=None,
        # torchrun has to pass the end on to its ranks, which SIGKILL gives it no time for.
        when_orphaned=signal.SIGTERM if ranks > 1 else signal.SIGKILL,
    )


class LocalRun:
    """One of the children is called `learner`; the run lasts as long as it does."""

    def __init__(self, specs: Sequence[ChildSpec], folder: Path, grace_s: float) -> None:
        self._folder = folder
        self._grace_s = grace_s
        self._pids: dict[str, int] = {}
        self._children = {spec.name: Child(spec, on_start=self._note) for spec in specs}
        self._over = asyncio.Event()
        self._broken: FatalExit | None = None
        self._learner_status = 0

    async def run(self, stop: asyncio.Event) -> int:
        async with asyncio.TaskGroup() as tasks:
            running = {name: tasks.create_task(self._keep(child), name=name) for name, child in self._children.items()}
            stopping = tasks.create_task(self._end_on(stop))
            await self._over.wait()
            stopping.cancel()
            await self._end(running)
        if self._broken is not None:
            return self._explain(self._broken)
        return _exit_code(self._learner_status)

    async def _keep(self, child: Child) -> None:
        try:
            status = await child.supervise()
        except FatalExit as fatal:  # the others drain: what the learner has learned is kept
            self._broken = self._broken if self._broken is not None else fatal
            self._over.set()
        else:
            if child.spec.name == "learner":
                self._learner_status = status
                self._over.set()

    async def _end_on(self, stop: asyncio.Event) -> None:
        await stop.wait()
        log.info("draining; another Ctrl-C ends everything at once")
        self._over.set()

    async def _end(self, running: Mapping[str, asyncio.Task[None]]) -> None:
        """The buffer goes last: the others still hand back tickets and write their last checkpoint."""
        users = [name for name in running if name != "buffer"]
        await self._terminate(users, running)
        if "buffer" in running:
            await self._terminate(["buffer"], running)

    async def _terminate(self, names: Iterable[str], running: Mapping[str, asyncio.Task[None]]) -> None:
        ending = list(names)
        for name in ending:
            self._children[name].terminate()
        _, late = await asyncio.wait([running[name] for name in ending], timeout=self._grace_s)
        for name in ending:
            if running[name] in late:
                log.warning(f"{name} did not drain within {self._grace_s:g} s and is killed")
                self._children[name].kill()

    def _note(self, name: str, pid: int) -> None:
        self._pids[name] = pid
        _write_whole(self._folder / "processes.json", json.dumps(self._pids, indent=2) + "\n")

    def _explain(self, fatal: FatalExit) -> int:
        if tail := self._children[fatal.spec.name].last_lines(LOG_TAIL):
            print(f"The last lines of {fatal.spec.log}:", file=sys.stderr)
            print("\n".join(f"  {line}" for line in tail), file=sys.stderr)
        print(f"async-rl: {fatal}", file=sys.stderr)
        return fatal.exit_code


def _exit_code(status: int) -> int:
    """As a shell would say it. Being ended by our own SIGTERM, for lack of a handler or by torchrun, is no failure."""
    code = status if status >= 0 else 128 - status
    return 0 if code == 128 + signal.SIGTERM else code


def _write_whole(path: Path, text: str) -> None:
    """A reader sees the old text or this one, never half of it."""
    draft = path.with_name(path.name + ".part")
    draft.write_text(text)
    draft.replace(path)
