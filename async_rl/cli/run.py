"""`async-rl run`, `learner` and `worker`: a whole run on this machine, or one of its processes."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Coroutine, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from async_rl.cli.grammar import CommandLine, Option, Verb
from async_rl.cli.role_process import become
from async_rl.config.loading import load, load_named, parse
from async_rl.errors import ConfigError
from async_rl.launch.commands import command, ranks_command
from async_rl.launch.run_folder import make_run_folder

if TYPE_CHECKING:
    from async_rl.config import Config
    from async_rl.config.training import AnyRun
    from async_rl.supervision.processes.ranks import RankRange


def run(line: CommandLine) -> int:
    from async_rl.cli.run_summary import write_summary
    from async_rl.launch import local

    config = load_with_name(line.config)
    supervise = partial(local.run, config, os.environ, view=line.has("view"))
    return run_and_summarise(config, "run", supervise, partial(write_summary, config))


def run_and_summarise(
    config: AnyRun, role: str, supervise: Callable[[], Coroutine[Any, Any, int]], write_summary: Callable[..., object]
) -> int:
    """Run all processes of a run in its folder; after a success write the summary. Returns the exit code."""
    from async_rl.cli.first_lines import first_lines
    from async_rl.launch import local
    from async_rl.run_folders.state import recorded_end
    from async_rl.telemetry import configure_logs

    started = time.monotonic()
    configure_logs(role, run_folder=config.run_folder)
    with local.sole_run(config):
        print(first_lines(config), flush=True)
        local.prepare_folder(config)
        with recorded_end(config.run_folder) as codes:
            codes.append(code := asyncio.run(supervise()))
    _write_report(config.run_folder)  # before the summary, whose last line is the path of summary.json
    if code == 0:
        from rich.console import Console

        write_summary(Console(), wall_s=time.monotonic() - started)
    return code


def _write_report(run_folder: Path) -> None:
    """Write report.html, however the run ended; a run without a step has none."""
    from async_rl.durable.best_effort import report_write_error
    from async_rl.run_folders.folder import RunFolder
    from async_rl.run_folders.report import write_report

    run, path = RunFolder(path=run_folder), run_folder / "report.html"
    if run.last_row() is not None:
        with report_write_error(path, print):
            try:
                write_report(run, path)
            except (KeyError, TypeError, ValueError) as error:  # the run itself has ended well
                print(f"{path.name} is not written: a file in {run_folder} has rows that no run writes ({error!r})")
            else:
                print(path)


def load_with_name(words: Sequence[str]) -> Config:
    """Load the configuration; a run without a name is named after its last file and the time."""
    config = load(words)
    return config if config.run.name else load([*words, "--run.name", made_up_name(words, "run")])


def made_up_name(words: Sequence[str], otherwise: str) -> str:
    files, _ = parse(words)
    return f"{files[-1].stem if files else otherwise}-{datetime.now(UTC):%Y%m%d-%H%M%S}"


def learner(line: CommandLine) -> NoReturn:
    """Become the learner's only rank, the parent of its ranks here, or one of the ranks that another launcher starts."""
    from async_rl.cli.first_lines import first_lines

    config = load_named(line.config)
    ranks = _ranks_of(config, node) if (node := line.integer("node")) is not None else None
    make_run_folder(config.run_folder)
    if os.environ.get("RANK", "0") == "0" and not node:
        print(first_lines(config))
    is_one_of_several = "WORLD_SIZE" in os.environ and ranks is None
    started = command("learner", line.config) if is_one_of_several else ranks_command("learner", line.config, config, ranks)
    become(started, config)


def _ranks_of(config: Config, node: int) -> RankRange | None:
    """The ranks of one of the machines among which the learner is divided. Raises ConfigError."""
    from async_rl.launch import fleet_plan

    members = fleet_plan.learner(config, has_gpus=False).members
    if node >= len(members):
        raise ConfigError(
            f"--node {node}: launch.learner_nodes is {len(members)}, and its machines are numbered from 0 to {len(members) - 1}"
        )
    return members[node].ranks


def worker(line: CommandLine) -> NoReturn:
    """Become a worker of the configuration, or of the run that another machine's learner holds."""
    if (address := line.text("join")) is not None:
        become(command("buffer.joining", [address, *line.config]))
    become(command("rollout_workers", line.words), load_named(line.config))


VERBS = (
    Verb(
        words="run",
        help="Start buffer, learner and workers on this machine; summarise at the end.",
        run=run,
        config="@ FILE",
        options=(Option(name="view", help="serve the run's web page beside it, and print its address"),),
    ),
    Verb(
        words="learner",
        help="Start the learner: all ranks that learner.parallel asks for, or the one that WORLD_SIZE and RANK name.",
        run=learner,
        config="@ FILE",
        options=(
            Option(
                name="node",
                value="N",
                read=int,
                least=0,
                help="start the ranks of one machine only: the Nth, from 0, of launch.learner_nodes",
            ),
        ),
    ),
    Verb(
        words="worker",
        help="Start one rollout worker.",
        run=worker,
        config="[@ FILE]",
        details="With --join, the run's configuration comes from its Redis, and @ FILE and --KEY VALUE are this machine's own.",
        options=(
            Option(
                name="join",
                value="ADDRESS",
                help="Redis of a run that has a learner, such as rediss://RUN-worker@HOST:6379; the password comes from "
                "--redis.password_file or ASYNC_RL_REDIS_PASSWORD",
            ),
        ),
    ),
)
