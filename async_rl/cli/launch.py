"""`async-rl launch ray` and `launch slurm`."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING

from async_rl.cli.grammar import CommandLine, Option, Verb
from async_rl.cli.run import load_with_name, run_and_summarise

if TYPE_CHECKING:
    from async_rl.config import Config

WORKERS = Option(name="workers", value="N", read=int, least=1, help="number of rollout workers (worker.processes)")


def ray(line: CommandLine) -> int:
    from async_rl.cli.run_summary import write_summary
    from async_rl.launch.fleet_plan import cores
    from async_rl.launch.ray import fleet
    from async_rl.launch.ray.cluster import Cluster
    from async_rl.launch.ray.reach import check

    config = _with_workers(line)
    with Cluster(line.text("address", "auto"), cores=cores(config)) as cluster:
        check(config, cluster.addresses())
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
)
