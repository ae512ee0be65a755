"""`async-rl launch ray`, and `async-rl fleet ...` for the fleet that it has started."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING

from async_rl.cli.grammar import CommandLine, Option, Verb
from async_rl.cli.run import load_with_name, run_and_summarise
from async_rl.config.loading import load_named
from async_rl.errors import ConfigError

if TYPE_CHECKING:
    from async_rl.launch.ray.desk import FleetRequest

ADDRESS = Option(
    name="address",
    value="ADDRESS",
    help="HOST:PORT of the Ray cluster; auto: the one that this machine belongs to (auto)",
)


def ray(line: CommandLine) -> int:
    from async_rl.cli.run_summary import write_summary
    from async_rl.launch.ray import fleet
    from async_rl.launch.ray.cluster import Cluster

    workers = line.integer("workers")
    words = [*line.config, *([f"--worker.processes={workers}"] if workers is not None else [])]
    config = load_with_name(words)
    with Cluster(line.text("address", "auto")) as cluster:
        fleet.check(config, cluster)
        supervise = partial(fleet.run, config, os.environ, cluster)
        return run_and_summarise(config, "fleet", supervise, partial(write_summary, config))


def ls(line: CommandLine) -> int:
    from async_rl.launch.ray.cluster import Cluster
    from async_rl.launch.ray.desk import fleet_rows

    with Cluster(line.text("address", "auto")) as cluster:
        rows = fleet_rows(cluster, load_named(line.config).run.name)
    width = max((len(row.name) for row in rows), default=0)
    for row in rows:
        print(f"{row.name:<{width}}  {row.where}")
    return 0


def scale(line: CommandLine) -> int:
    from async_rl.launch.ray.desk import Scale

    wanted = line.operands[0]
    if not wanted.isdecimal():
        raise ConfigError(f"fleet scale {wanted}: name the number of workers, such as `async-rl fleet scale 4`")
    return _ask(line, Scale(workers=int(wanted)))


def drain(line: CommandLine) -> int:
    from async_rl.launch.ray.desk import DrainOne

    return _ask(line, DrainOne(name=line.operands[0]))


def stop(line: CommandLine) -> int:
    from async_rl.launch.ray.desk import StopAll

    return _ask(line, StopAll())


def _ask(line: CommandLine, request: FleetRequest) -> int:
    from async_rl.launch.ray.cluster import Cluster
    from async_rl.launch.ray.desk import ask_fleet

    with Cluster(line.text("address", "auto")) as cluster:
        print(ask_fleet(cluster, load_named(line.config).run.name, request))
    return 0


VERBS = (
    Verb(
        words="launch ray",
        help="Run all processes on a Ray cluster: place, restart and move them.",
        run=ray,
        config="@ FILE",
        options=(
            Option(name="workers", value="N", read=int, least=1, help="number of rollout workers (worker.processes)"),
            Option(
                name="address",
                value="ADDRESS",
                help="HOST:PORT of the cluster; auto: the one that this machine belongs to; local: start one here (auto)",
            ),
        ),
    ),
    Verb(
        words="fleet ls",
        help="List the processes of a fleet on a Ray cluster and their machines.",
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
