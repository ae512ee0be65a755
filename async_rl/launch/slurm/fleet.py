"""`async-rl launch slurm`: the jobs of a run, and what may be asked of them while they wait or run.

learner  ──▶ learner ──▶ ...      a chain: each job waits for the one before (--dependency=afterany)
worker[0-7], worker[8-11], ...    arrays: `fleet scale` submits another one, or drains tasks
evaluator
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from async_rl.config import Config
from async_rl.config.exposure import is_loopback
from async_rl.config.pretrained import left_to_fetch
from async_rl.durable.private_files import keep_files_private
from async_rl.errors import ConfigError
from async_rl.launch.local import prepare_folder
from async_rl.launch.own_address import redis_hosts
from async_rl.launch.slurm import queue
from async_rl.launch.slurm.queue import Job
from async_rl.launch.slurm.scripts import kind_of, write_scripts
from async_rl.run_folders.state import LOCK, is_held


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """A script of the run, and the jobs that it became."""

    script: Path
    jobs: Sequence[str]
    """Empty: it was only written."""


def check(config: Config) -> None:
    """Refuse a configuration whose processes would not find each other. Raises ConfigError."""
    if not config.redis.url:
        raise ConfigError(
            "redis.url is empty, but jobs of Slurm run on several machines: name a server that all of them reach "
            "(docs/launch/slurm.md)"
        )
    if not config.wire.insecure and not all(is_loopback(host) for host in redis_hosts(config)):
        raise ConfigError(
            "wire.insecure is false, but jobs of Slurm run on several machines: weights travel between them, and process "
            "groups do not authenticate their members; if the network is private, set wire.insecure: true"
        )


def launch(config: Config, *, is_dry: bool) -> list[Submitted]:
    """Write the scripts into the run's folder and submit them, unless `is_dry`. Raises ConfigError."""
    check(config)
    keep_files_private()
    if not is_dry and (found := queue.jobs_in(config.run_folder)):
        raise ConfigError(
            f"run {config.run.name!r} already has jobs in Slurm's queue ({', '.join(job.id for job in found)}): "
            "`async-rl fleet stop` ends them"
        )
    if is_held(config.run_folder / LOCK):
        raise ConfigError(f"run {config.run.name!r} is already running in {config.run_folder}; stop it first")
    prepare_folder(left_to_fetch(config))
    paths = write_scripts(config, has_gpus=_has_gpus(config, is_dry=is_dry))
    return [Submitted(script=path, jobs=[] if is_dry else _submit(config, kind, path)) for kind, path in paths.items()]


def _has_gpus(config: Config, *, is_dry: bool) -> bool:
    if config.device != "auto":
        return config.device == "cuda"
    try:
        return queue.has_gpus()
    except ConfigError:
        if is_dry:  # perhaps written elsewhere than where it will be submitted
            return False
        raise


def _submit(config: Config, kind: str, script: Path) -> list[str]:
    if kind == "learner":
        chain = [queue.submit(script)]
        for _ in range(config.launch.slurm.learner_jobs - 1):
            chain.append(queue.submit(script, f"--dependency=afterany:{chain[-1]}"))
        return chain
    if kind == "worker":
        return [_submit_workers(script, list(range(config.worker.processes)))] if config.worker.processes else []
    return [queue.submit(script)]


def _submit_workers(script: Path, indices: Sequence[int]) -> str:
    return queue.submit(script, f"--array={','.join(map(str, indices))}")


def jobs_of(config: Config) -> list[Job]:
    """The jobs of a run in the queue. Raises ConfigError if there is none."""
    found = queue.jobs_in(config.run_folder)
    if not found:
        raise ConfigError(f"Slurm's queue has no job of run {config.run.name!r}; `async-rl launch slurm` submits them")
    return found


def name_of(config: Config, job: Job) -> str:
    kind = kind_of(config, job.name)
    return kind if job.index is None else f"{kind}-{job.index}"


def where(job: Job) -> str:
    place = f"waits ({job.reason})" if job.is_pending else job.nodes
    return f"{place}, job {job.id}{', drains' if job.leaves else ''}"


def scale(config: Config, wanted: int) -> str:
    """Submit another array of workers, or drain some of them. Returns a sentence."""
    everyone = [job for job in jobs_of(config) if kind_of(config, job.name) == "worker"]
    staying = sorted((job for job in everyone if not job.leaves), key=lambda job: job.index or 0)
    if len(staying) < wanted:
        taken = {job.index for job in everyone}
        free = [index for index in range(wanted + len(everyone)) if index not in taken][: wanted - len(staying)]
        _submit_workers(config.run_folder / "slurm" / "worker.sbatch", free)
    for job in staying[wanted:]:
        queue.drain(job)
    return f"{wanted} workers, {len(staying)} before"


def drain(config: Config, name: str) -> str:
    """Let one worker drain, without a successor. Returns a sentence."""
    workers = {name_of(config, job): job for job in jobs_of(config) if kind_of(config, job.name) == "worker"}
    if name not in workers:
        return f"there is no worker {name!r}; there are {', '.join(workers) or 'none'}"
    queue.drain(workers[name])
    return f"{name} drains"


def stop(config: Config) -> str:
    """Drain all jobs, and cancel those that wait. Returns a sentence."""
    end(jobs_of(config))
    return "the fleet drains"


def end(jobs: Sequence[Job]) -> None:
    """Drain jobs, those that wait first, so that none of them starts meanwhile."""
    for job in sorted(jobs, key=lambda job: not job.is_pending):
        queue.drain(job)
