"""`async-rl launch ray` and `launch slurm`, and `async-rl fleet ...` for the fleet that they have started."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from async_rl.cli.grammar import CommandLine, Option, Verb
from async_rl.cli.run import load_with_name, run_and_summarise
from async_rl.config.loading import load_named
from async_rl.errors import ConfigError

if TYPE_CHECKING:
    from async_rl.config import Config
    from async_rl.launch.ray.desk import FleetRequest

ADDRESS = Option(
    name="address",
    value="ADDRESS",
    help="HOST:PORT of the Ray cluster; auto: the one that this machine belongs to (auto). Unused by fleets on Slurm",
)
WORKERS = Option(name="workers", value="N", read=int, least=1, help="number of rollout workers (worker.processes)")


def ray(line: CommandLine) -> int:
    from async_rl.cli.run_summary import write_summary
    from async_rl.launch.ray import fleet
    from async_rl.launch.ray.cluster import Cluster

    config = _with_workers(line)
    with Cluster(line.text("address", "auto")) as cluster:
        fleet.check(config, cluster)
        supervise = partial(fleet.run, config, os.environ, cluster)
        return run_and_summarise(config, "fleet", supervise, partial(write_summary, config))


def slurm(line: CommandLine) -> int:
    from async_rl.launch.slurm.fleet import launch

    config = _with_workers(line)
    for each in launch(config, is_dry=line.has("dry-run")):
        print(f"{each.script}  {', then '.join(f'job {job}' for job in each.jobs)}".rstrip())
    return 0


def _with_workers(line: CommandLine) -> Config:
    workers = line.integer("workers")
    return load_with_name([*line.config, *([f"--worker.processes={workers}"] if workers is not None else [])])


def ls(line: CommandLine) -> int:
    config = load_named(line.config)
    rows = _slurm_rows(config) if _is_on_slurm(config) else _ray_rows(config, line)
    width = max((len(name) for name, _ in rows), default=0)
    for name, where in rows:
        print(f"{name:<{width}}  {where}")
    return 0


def _ray_rows(config: Config, line: CommandLine) -> list[tuple[str, str]]:
    from async_rl.launch.ray.cluster import Cluster
    from async_rl.launch.ray.desk import fleet_rows

    with Cluster(line.text("address", "auto")) as cluster:
        return [(row.name, row.where) for row in fleet_rows(cluster, config.run.name)]


def _slurm_rows(config: Config) -> list[tuple[str, str]]:
    from async_rl.launch.slurm import fleet

    return [(fleet.name_of(config, job), fleet.where(job)) for job in fleet.jobs_of(config)]


def _is_on_slurm(config: Config) -> bool:
    """Whether `launch slurm` has submitted the run's jobs: its scripts lie in the run's folder."""
    return (config.run_folder / "slurm").exists()


def scale(line: CommandLine) -> int:
    from async_rl.launch.ray.desk import Scale
    from async_rl.launch.slurm import fleet

    wanted = line.operands[0]
    if not wanted.isdecimal():
        raise ConfigError(f"fleet scale {wanted}: name the number of workers, such as `async-rl fleet scale 4`")
    return _ask(line, Scale(workers=int(wanted)), lambda config: fleet.scale(config, int(wanted)))


def drain(line: CommandLine) -> int:
    from async_rl.launch.ray.desk import DrainOne
    from async_rl.launch.slurm import fleet

    name = line.operands[0]
    return _ask(line, DrainOne(name=name), lambda config: fleet.drain(config, name))


def stop(line: CommandLine) -> int:
    from async_rl.launch.ray.desk import StopAll
    from async_rl.launch.slurm import fleet

    return _ask(line, StopAll(), fleet.stop)


def _ask(line: CommandLine, request: FleetRequest, ask_slurm: Callable[[Config], str]) -> int:
    config = load_named(line.config)
    print(ask_slurm(config) if _is_on_slurm(config) else _ask_ray(config, line, request))
    return 0


def _ask_ray(config: Config, line: CommandLine, request: FleetRequest) -> str:
    from async_rl.launch.ray.cluster import Cluster
    from async_rl.launch.ray.desk import ask_fleet

    with Cluster(line.text("address", "auto")) as cluster:
        return ask_fleet(cluster, config.run.name, request)


VERBS = (
    Verb(
        words="launch ray",
        help="Run all processes on a Ray cluster: place, restart and move them.",
        run=ray,
        config="@ FILE",
        options=(
            WORKERS,
            Option(
                name="address",
                value="ADDRESS",
                help="HOST:PORT of the cluster; auto: the one that this machine belongs to; local: start one here (auto)",
            ),
        ),
    ),
    Verb(
        words="launch slurm",
        help="Write the scripts of all processes' jobs into the run's folder, and submit them to Slurm.",
        run=slurm,
        config="@ FILE",
        options=(WORKERS, Option(name="dry-run", help="write the scripts, and submit nothing")),
    ),
    Verb(
        words="fleet ls",
        help="List the processes of a fleet on a Ray cluster or in Slurm's queue, and their machines.",
        run=ls,
        options=(ADDRESS,),
    ),
    Verb(
        words="fleet scale",
        operands="WORKERS",
        help="Change the number of workers; those that leave drain first.",
        run=scale,
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
