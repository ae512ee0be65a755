"""`async-rl run` and `train`: starts the processes of a run on this machine, supervises them, and ends them in order.

buffer serve ◀── worker 0 … n        when the learner ends, workers are stopped,
      ▲────────── learner            then the buffer, and the summary is written
"""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Literal, TextIO

import structlog

from async_rl.config import Config
from async_rl.config.loading import load_file, to_yaml
from async_rl.config.training import AnyRun, TrainingConfig
from async_rl.durable.best_effort import explain_write_error, report_write_error
from async_rl.durable.file_lock import try_lock
from async_rl.durable.private_files import keep_files_private
from async_rl.durable.row_file import rows_of
from async_rl.durable.whole_file import write_whole
from async_rl.errors import ConfigError, RestartLimit
from async_rl.launch.commands import SCHEDULED, WORKER_INDEX, command, computes_on_cpu, environment, ranks_command
from async_rl.launch.run_folder import make_run_folder
from async_rl.recording.process_events import ProcessEvents
from async_rl.supervision import Child, ChildSpec, FatalExit, drain_on_signals
from async_rl.supervision.processes.children import how_it_ended
from async_rl.supervision.processes.ranks import RANK_VARIABLES

log = structlog.get_logger("async_rl.run")

CHECKPOINT_GRACE_S = 60.0
"""Seconds that the learner may take for its last step and checkpoint before it is killed."""

DRAIN_GRACE_S = 10.0
"""Seconds beyond `worker.drain_s` that a worker may take to return its tickets."""

LOG_TAIL = 30

PROBE_S = 0.1
"""Seconds until a held lock is tried again: `async-rl runs` and `top` hold it for an instant to see whether a run lives."""


@contextmanager
def sole_run(config: AnyRun) -> Generator[None]:
    """Hold the run's lock while inside. Raises ConfigError if another supervisor on this machine holds it."""
    keep_files_private()
    make_run_folder(config.run_folder)
    with _opened(config.run_folder / "run.lock") as lock:
        if not _take(lock):
            raise ConfigError(
                f"run {config.run.name!r} is already running in {config.run_folder}; stop it, or choose another run.name"
            )
        for left in config.run_folder.glob("engines-*"):  # by workers that were killed
            shutil.rmtree(left, ignore_errors=True)
        yield


def _take(lock: TextIO) -> bool:
    if try_lock(lock):
        return True
    time.sleep(PROBE_S)
    return try_lock(lock)


def _opened(path: Path) -> TextIO:
    try:
        return path.open("w")
    except OSError as error:  # left by a run of another user
        raise ConfigError(f"{path} cannot be written: {error.strerror}; choose another run.name or run.folder") from error


def prepare_folder(config: AnyRun) -> Path:
    """Create the run's folder and write the resolved configuration, which all processes of the run read."""
    folder = config.run_folder
    make_run_folder(folder)
    if isinstance(config, Config):
        begin_anew(config)
    try:
        write_whole(folder / "config.yaml", to_yaml(config.seen_from_anywhere()))
    except OSError as error:
        raise ConfigError(f"run.folder: {explain_write_error(error, folder / 'config.yaml')}") from error
    return folder / "config.yaml"


def begin_anew(config: Config) -> None:
    """Delete the Redis data of a run of this name that ended before its first step with a different configuration.

    Nothing was trained, and the data does not fit the new configuration. An external server (redis.url) is not touched.
    """
    folder = config.run_folder
    if config.redis.url or not config.redis_folder.exists() or _has_trained(folder):
        return
    try:
        before = load_file(Config, folder / "config.yaml").fleet_facts
    except ConfigError:
        before = None
    if before != config.seen_from_anywhere().fleet_facts:
        log.info("a run of this name ended before its first step with another configuration; its data is discarded")
        shutil.rmtree(config.redis_folder)
        shutil.rmtree(folder / "payloads", ignore_errors=True)


def _has_trained(folder: Path) -> bool:
    checkpoints = folder / "checkpoints"
    if checkpoints.exists() and any(checkpoints.iterdir()):
        return True
    return any(b'"groups"' in row for row in rows_of(folder / "trained.jsonl"))


async def run(config: Config, inherited: Mapping[str, str], *, view: bool = False) -> int:
    """Run everything and return the exit code: 0 if the learner finished or everything drained, else the failed process's."""
    stop = drain_on_signals()
    return await LocalRun(specs(config, inherited, view=view), config.run_folder, config.recording.events_bytes).run(stop)


async def train(config: TrainingConfig, inherited: Mapping[str, str]) -> int:
    """Like `run`, for `async-rl train`: only a learner, which reads a dataset."""
    stop = drain_on_signals()
    spec = _learner("learner.training", config, _environment(config, inherited))
    return await LocalRun([spec], config.run_folder).run(stop)


def specs(config: Config, inherited: Mapping[str, str], *, view: bool = False) -> list[ChildSpec]:
    """The processes of the run, in the order in which they start; with `view`, its web page is one of them."""
    args = ["@", str(config.run_folder / "config.yaml")]
    shared, processes = _environment(config, inherited), config.worker.processes

    def child(name: str, command: list[str], *, place: int | None = None, grace_s: float = 60.0) -> ChildSpec:
        """`place`: its number among the processes that divide the GPUs."""
        own = shared if place is None or computes_on_cpu(config) else {**shared, WORKER_INDEX: str(place)}
        output, policy = config.run_folder / "logs" / f"{name}.log", config.supervision.policy
        return ChildSpec(name=name, command=command, environment=own, log=output, policy=policy, grace_s=grace_s)

    worker, grace_s = command("rollout_workers", args), config.worker.drain_s + DRAIN_GRACE_S
    evaluator = command("rollout_workers.evaluation", [SCHEDULED, *args])
    return [
        *([] if config.redis.url else [child("buffer", command("buffer", ["serve", *args]))]),
        _learner("learner", config, shared),
        *(child(f"worker-{index}", worker, place=index, grace_s=grace_s) for index in range(processes)),
        *([child("evaluator", evaluator, place=processes, grace_s=DRAIN_GRACE_S)] if config.evaluation.every else []),
        *([replace(child("view", command("buffer.view", args)), log=None)] if view else []),  # its address is for the terminal
    ]


def _environment(config: AnyRun, inherited: Mapping[str, str]) -> dict[str, str]:
    """The environment without variables of ranks: the run starts its own ranks even if this process is one."""
    return environment(config, {name: value for name, value in inherited.items() if name not in RANK_VARIABLES})


def _learner(role: Literal["learner", "learner.training"], config: AnyRun, shared: Mapping[str, str]) -> ChildSpec:
    return ChildSpec(
        name="learner",
        command=ranks_command(role, ["@", str(config.run_folder / "config.yaml")], config),
        environment=shared,
        log=None,
        policy=config.supervision.policy,
        grace_s=CHECKPOINT_GRACE_S,
    )


class LocalRun:
    """Supervises the processes of a run until the learner ends, a required process fails, or `stop` is set.

    waits for:    the learner to finish; a process that must not be restarted any more
    unblocked by: exit of child processes; `stop` (SIGTERM, Ctrl-C)
    """

    def __init__(self, specs: Sequence[ChildSpec], folder: Path, events_bytes: int = 0) -> None:
        """`events_bytes`: limit of the run's recorded events; 0: none are recorded."""
        self._folder = folder
        self._events = ProcessEvents(folder, events_bytes=events_bytes, warn=log.warning)
        self._pids: dict[str, int] = {}
        self._children = {spec.name: self._child(spec) for spec in specs}
        self._left_out: set[str] = set()
        self._over = asyncio.Event()
        self._broken: FatalExit | None = None
        self._learner_status = 0

    async def run(self, stop: asyncio.Event) -> int:
        async with asyncio.TaskGroup() as tasks:
            running = {name: tasks.create_task(self._keep(name), name=name) for name in self._children}
            stopping = tasks.create_task(self._end_on(stop))
            await self._over.wait()
            stopping.cancel()
            await self._end(running)
        self._events.close()
        if self._broken is not None:
            return self._explain(self._broken)
        return _exit_code(self._learner_status)

    async def _keep(self, name: str) -> None:
        while not self._over.is_set():
            try:
                status = await self._children[name].supervise()
            except FatalExit as fatal:
                if self._goes_on_without(name):
                    await self._leave_out(fatal)
                else:  # the others drain, so that the learner writes a checkpoint
                    self._broken = self._broken if self._broken is not None else fatal
                    self._over.set()
            else:
                self._left_out.add(name)
                if name == "learner":
                    self._learner_status = status
                    self._over.set()
                return

    def _goes_on_without(self, name: str) -> bool:
        """Whether the run can continue without this process: an evaluator, or a worker if there are others."""
        if name in ("learner", "buffer"):
            return False
        workers = {other for other in self._children if other.startswith("worker-")}
        return name not in workers or bool(workers - self._left_out - {name})

    async def _leave_out(self, fatal: FatalExit) -> None:
        """Wait before the next attempt: for `window_s`, or until the run ends if a restart would not help."""
        name, again_s = fatal.spec.name, fatal.spec.policy.window_s
        self._left_out.add(name)
        if fatal.exit_code != RestartLimit.exit_code:
            log.warning(f"{fatal}; the run continues without it", **self._last_words(name))
            await self._over.wait()
            return
        log.warning(f"{fatal}; the run continues without it and tries again in {again_s:g} s", **self._last_words(name))
        with suppress(TimeoutError):
            async with asyncio.timeout(again_s):
                await self._over.wait()
        self._left_out.discard(name)
        self._children[name] = self._child(fatal.spec)

    def _last_words(self, name: str) -> dict[str, str]:
        return {"its_last_line": lines[-1]} if (lines := self._children[name].last_lines(1)) else {}

    async def _end_on(self, stop: asyncio.Event) -> None:
        await stop.wait()
        log.info("draining; press Ctrl-C again to end everything at once")
        self._over.set()

    async def _end(self, running: Mapping[str, asyncio.Task[None]]) -> None:
        """End all processes, the buffer last: the others still return tickets and write the last checkpoint."""
        async with asyncio.TaskGroup() as ending:
            for name in running:
                if name != "buffer":
                    ending.create_task(self._terminate(name, running[name]), name=f"end of {name}")
        if "buffer" in running:
            await self._terminate("buffer", running["buffer"])

    async def _terminate(self, name: str, running: asyncio.Task[None]) -> None:
        child = self._children[name]
        child.terminate()
        if (await asyncio.wait([running], timeout=child.spec.grace_s))[1]:
            log.warning(f"{name} did not drain within {child.spec.grace_s:g} s, killing it")
            child.kill()

    def _child(self, spec: ChildSpec) -> Child:
        return Child(spec, on_start=self._note, on_end=self._note_end)

    def _note_end(self, name: str, pid: int, status: int) -> None:
        self._events.ended(name, pid, was_asked=status == 0 or self._over.is_set(), detail=how_it_ended(status))

    def _note(self, name: str, pid: int) -> None:
        self._events.started(name, pid)
        self._pids[name] = pid
        path = self._folder / "processes.json"
        with report_write_error(path, log.warning):  # informational: the run continues without it
            write_whole(path, json.dumps(self._pids, indent=2) + "\n")

    def _explain(self, fatal: FatalExit) -> int:
        name = fatal.spec.name
        if tail := self._children[name].last_lines(LOG_TAIL):
            print(f"The last lines of {fatal.spec.log}:", file=sys.stderr)
            print("\n".join(f"  {line}" for line in tail), file=sys.stderr)
        others = "; no other worker is left" if self._left_out - {name} else ""
        print(f"async-rl: {fatal}{others}", file=sys.stderr)
        return fatal.exit_code


def _exit_code(status: int) -> int:
    """128 + N for signal N; 0 for our own SIGTERM, which ends a process before it has a handler."""
    code = status if status >= 0 else 128 - status
    return 0 if code == 128 + signal.SIGTERM else code
