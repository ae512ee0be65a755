"""`async-rl launch slurm`: the jobs of a run, and what may be asked of them while they wait or run.

learner  ──▶ learner ──▶ ...      a chain: each job waits for the one before (--dependency=afterany)
worker[0-7], worker[8-11], ...    arrays: `fleet scale` submits another one, or drains tasks
evaluator
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
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
from async_rl.launch.slurm.scripts import KINDS, check_options, kind_of, own_options, partitions_of, write_scripts
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
    check_options(config)


def launch(config: Config, *, is_dry: bool) -> list[Submitted]:
    """Write the scripts into the run's folder and submit them, unless `is_dry`. Raises ConfigError."""
    check(config)
    keep_files_private()
    if found := queue.jobs_if_here(config.run_folder) if is_dry else queue.jobs_in(config.run_folder):
        raise ConfigError(
            f"run {config.run.name!r} already has jobs in Slurm's queue ({', '.join(job.id for job in found)}), which read its "
            "scripts and configuration: `async-rl fleet stop` ends them, or choose another run.name"
        )
    if is_held(config.run_folder / LOCK):
        raise ConfigError(f"run {config.run.name!r} is already running in {config.run_folder}; stop it first")
    prepare_folder(left_to_fetch(config))
    paths = write_scripts(config, on_gpus=_on_gpus(config, is_dry=is_dry))
    jobs: Mapping[str, Sequence[str]] = {} if is_dry else _submit_all(config, paths)
    return [Submitted(script=path, jobs=jobs.get(kind, [])) for kind, path in paths.items()]


def _on_gpus(config: Config, *, is_dry: bool) -> Collection[str]:
    """The kinds of processes whose jobs may ask for GPUs: without `device`, as the nodes of their partitions."""
    if config.device != "auto":
        return KINDS if config.device == "cuda" else ()
    try:
        return [kind for kind in KINDS if queue.has_gpus(partitions_of(own_options(config, kind)))]
    except ConfigError:
        if is_dry:  # perhaps written elsewhere than where it will be submitted
            return ()
        raise


def _submit_all(config: Config, scripts: Mapping[str, Path]) -> Mapping[str, Sequence[str]]:
    """Submit the scripts and return the jobs of each kind; if one is refused, cancel what was submitted before it."""
    jobs: dict[str, list[str]] = {}
    try:
        for kind, script in scripts.items():
            for job in _submit(config, kind, script):
                jobs.setdefault(kind, []).append(job)
    except ConfigError as error:
        raise ConfigError(f"{error}{_taken_back([job for chain in jobs.values() for job in chain])}") from error
    return jobs


def _taken_back(jobs: Sequence[str]) -> str:
    """Cancel jobs, and return the end of a sentence about them."""
    if not jobs:
        return ""
    try:
        queue.cancel(jobs)
    except ConfigError as error:
        return f"; what was submitted before is still in the queue ({error}): `scancel {' '.join(jobs)}` ends it"
    return f"; what was submitted before it ({', '.join(jobs)}) is cancelled"


def _submit(config: Config, kind: str, script: Path) -> Iterator[str]:
    """Submit the jobs of a script, and yield each when it is in the queue."""
    if kind == "learner":
        yield (job := queue.submit(script))
        for _ in range(config.launch.slurm.learner_jobs - 1):
            yield (job := queue.submit(script, f"--dependency=afterany:{job}"))
    elif kind == "worker":
        if config.worker.processes:
            yield _submit_workers(script, list(range(config.worker.processes)))
    else:
        yield queue.submit(script)


def _submit_workers(script: Path, indices: Sequence[int]) -> str:
    return queue.submit(script, f"--array={','.join(map(str, indices))}")


def name_of(config: Config, job: Job) -> str:
    kind = kind_of(config, job.name)
    return kind if job.index is None else f"{kind}-{job.index}"


def where(job: Job) -> str:
    place = f"waits ({job.reason})" if job.is_pending else job.nodes
    return f"{place}, job {job.id}{', drains' if job.leaves else ''}"


def scale(config: Config, jobs: Sequence[Job], wanted: int) -> str:
    """Submit another array of workers, or drain some of them. Returns a sentence."""
    everyone = [job for job in jobs if kind_of(config, job.name) == "worker"]
    staying = sorted((job for job in everyone if not job.leaves), key=lambda job: job.index or 0)
    if len(staying) < wanted:
        taken = {job.index for job in everyone}
        free = [index for index in range(wanted + len(everyone)) if index not in taken][: wanted - len(staying)]
        _submit_workers(config.run_folder / "slurm" / "worker.sbatch", free)
    for job in staying[wanted:]:
        queue.drain(job)
    return f"{wanted} workers, {len(staying)} before"


def drain(config: Config, jobs: Sequence[Job], name: str) -> str:
    """Let one worker drain, without a successor. Returns a sentence."""
    workers = {name_of(config, job): job for job in jobs if kind_of(config, job.name) == "worker"}
    if name not in workers:
        return f"there is no worker {name!r}; there are {', '.join(workers) or 'none'}"
    queue.drain(workers[name])
    return f"{name} drains"


def stop(jobs: Sequence[Job]) -> str:
    """Drain all jobs, and cancel those that wait. Returns a sentence."""
    end(jobs)
    return "the fleet drains"


def end(jobs: Sequence[Job]) -> None:
    """Drain jobs, those that wait first, so that none of them starts meanwhile. Raises NoAnswer; may be repeated."""
    for job in sorted(jobs, key=lambda job: not job.is_pending):
        queue.drain(job)
