"""`async-rl fleet ...`: about a fleet in Slurm's queue, on a Ray cluster, else about the run's processes over its Redis."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NoReturn

from async_rl.cli.grammar import CommandLine, Option, Verb
from async_rl.cli.role_process import become, in_buffer
from async_rl.config.loading import load_unfetched
from async_rl.errors import ConfigError
from async_rl.launch.commands import command

if TYPE_CHECKING:
    from async_rl.config import Config
    from async_rl.launch.ray.cluster import Cluster
    from async_rl.launch.ray.desk import FleetRequest
    from async_rl.launch.slurm.queue import Job

    OnSlurm = Callable[[Config, Sequence[Job]], str]

HERE = "auto"
ADDRESS = Option(
    name="address",
    value="ADDRESS",
    help="HOST:PORT of the Ray cluster, or the run's Redis, such as rediss://RUN-operator@HOST:6379; auto: the fleet in "
    "Slurm's queue, or on the Ray cluster that this machine belongs to, else what uses redis.url (auto)",
)


def ls(line: CommandLine) -> int:
    from async_rl.launch.ray.desk import fleet_rows
    from async_rl.launch.slurm import fleet

    return _ask(
        line,
        lambda cluster, run: _table((row.name, row.where) for row in fleet_rows(cluster, run)),
        lambda config, jobs: _table((fleet.name_of(config, job), fleet.where(job)) for job in jobs),
    )


def scale(line: CommandLine) -> int:
    from async_rl.launch.ray.desk import Scale
    from async_rl.launch.slurm import fleet

    wanted = line.operands[0]
    if not wanted.isdecimal():
        raise ConfigError(f"fleet scale {wanted}: name the number of workers, such as `async-rl fleet scale 4`")
    on_ray = _request(Scale(workers=int(wanted)))
    return _ask(line, on_ray, lambda config, jobs: fleet.scale(config, jobs, int(wanted)), over_redis=_cannot_scale)


def drain(line: CommandLine) -> int:
    from async_rl.launch.ray.desk import DrainOne
    from async_rl.launch.slurm import fleet

    name = line.operands[0]
    return _ask(line, _request(DrainOne(name=name)), lambda config, jobs: fleet.drain(config, jobs, name))


def stop(line: CommandLine) -> int:
    from async_rl.launch.ray.desk import StopAll
    from async_rl.launch.slurm import fleet

    return _ask(line, _request(StopAll()), lambda _config, jobs: fleet.stop(jobs))


def _over_redis(line: CommandLine) -> NoReturn:
    if line.text("address", HERE) != HERE:  # it leads to the configuration
        become(command("buffer", [*line.verb.words.split(), *line.words]))
    in_buffer(line)


def _cannot_scale(_line: CommandLine) -> NoReturn:
    raise ConfigError(
        "only `async-rl launch ray` and `launch slurm` can scale a fleet, and neither this machine's Ray cluster nor Slurm's "
        "queue has this one; elsewhere start workers with `async-rl worker --join` and end them with `async-rl fleet drain`"
    )


def _ask(
    line: CommandLine,
    on_ray: Callable[[Cluster, str], str],
    on_slurm: OnSlurm,
    over_redis: Callable[[CommandLine], NoReturn] = _over_redis,
) -> int:
    """Ask what runs the fleet, and print its answer."""
    address = line.text("address", HERE)
    if "://" in address:
        over_redis(line)
    config = load_unfetched(line.config)
    if address == HERE and (jobs := _slurm_jobs(config)):
        print(on_slurm(config, jobs))
    elif (cluster := _ray_cluster(address, config.run.name)) is not None:
        with cluster:
            print(on_ray(cluster, config.run.name))
    else:
        over_redis(line)
    return 0


def _slurm_jobs(config: Config) -> Sequence[Job]:
    """The jobs in Slurm's queue of a run that `launch slurm` has written scripts for."""
    from async_rl.launch.slurm import queue

    if not (config.run_folder / "slurm").exists():
        return []
    try:
        return queue.jobs_if_here(config.run_folder)
    except queue.NoAnswer as error:
        raise ConfigError(
            f"{error}; run {config.run.name!r} has been on Slurm: ask again, or name the --address of its Ray cluster or Redis"
        ) from error


def _ray_cluster(address: str, run: str) -> Cluster | None:
    """The cluster at an address; for HERE, this machine's, and None unless it has the run's fleet."""
    from async_rl.launch.ray.cluster import Cluster
    from async_rl.launch.ray.desk import has_fleet

    try:
        cluster = Cluster(address)
    except ConfigError:
        if address != HERE:
            raise
        return None
    if address != HERE or has_fleet(cluster, run):
        return cluster
    cluster.close()
    return None


def _request(request: FleetRequest) -> Callable[[Cluster, str], str]:
    from async_rl.launch.ray.desk import ask_fleet

    return lambda cluster, run: ask_fleet(cluster, run, request)


def _table(rows: Iterable[tuple[str, str]]) -> str:
    listed = list(rows)
    width = max((len(name) for name, _ in listed), default=0)
    return "\n".join(f"{name:<{width}}  {where}" for name, where in listed)


SCALE = Verb(
    words="fleet scale",
    operands="WORKERS",
    help="Change the number of workers of a fleet on a Ray cluster or in Slurm's queue; those that leave drain first.",
    run=scale,
    options=(ADDRESS,),
)
REDIS_VERBS = (
    Verb(
        words="fleet ls",
        help="List the processes of a fleet and their machines.",
        run=ls,
        options=(ADDRESS,),
    ),
    Verb(
        words="fleet drain",
        operands="NAME",
        help="Let one worker drain, without a successor.",
        run=drain,
        options=(ADDRESS,),
    ),
    Verb(words="fleet stop", help="Drain the whole fleet; the run can be resumed.", run=stop, options=(ADDRESS,)),
)
"""What can also be asked over the run's Redis, in the buffer's process."""
VERBS = (*REDIS_VERBS, SCALE)
