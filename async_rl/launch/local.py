"""`async-rl run` and `train`: the processes of a run on this machine, and its folder."""

from __future__ import annotations

import shutil
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal, TextIO

import structlog

from async_rl.config import Config
from async_rl.config.loading import load_file, to_yaml
from async_rl.config.training import AnyRun, TrainingConfig
from async_rl.durable.best_effort import explain_write_error
from async_rl.durable.file_lock import try_lock
from async_rl.durable.private_files import keep_files_private
from async_rl.durable.row_file import rows_of
from async_rl.durable.whole_file import write_whole
from async_rl.errors import ConfigError
from async_rl.launch.commands import (
    SCHEDULED,
    WORKER_INDEX,
    command,
    computes_on_cpu,
    environment,
    learner_environment,
    ranks_command,
)
from async_rl.launch.run_folder import make_run_folder
from async_rl.launch.run_supervisor import RunSupervisor, Start
from async_rl.supervision import Child, ChildSpec, drain_on_signals
from async_rl.supervision.processes.ranks import RANK_VARIABLES

log = structlog.get_logger("async_rl.run")

CHECKPOINT_GRACE_S = 60.0
"""Seconds that the learner may take for its last step and checkpoint before it is killed."""

DRAIN_GRACE_S = 10.0
"""Seconds beyond `worker.drain_s` that a worker may take to return its tickets."""

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
    return await RunSupervisor(
        children(specs(config, inherited, view=view)), config.run_folder, config.recording.events_bytes
    ).run(stop)


async def train(config: TrainingConfig, inherited: Mapping[str, str]) -> int:
    """Like `run`, for `async-rl train`: only a learner, which reads a dataset."""
    stop = drain_on_signals()
    spec = _learner("learner.training", config, _environment(config, inherited))
    return await RunSupervisor(children([spec]), config.run_folder).run(stop)


def children(specs: Sequence[ChildSpec]) -> dict[str, Start]:
    """How a supervisor starts these child processes, by name."""
    return {spec.name: partial(Child, spec) for spec in specs}


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
        environment=learner_environment(config, shared),
        log=None,
        policy=config.supervision.policy,
        grace_s=CHECKPOINT_GRACE_S,
    )
