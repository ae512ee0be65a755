"""Pure: the scripts that sbatch gets. They hold no secrets: passwords come from files, or from the environment of sbatch."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Collection, Iterable
from pathlib import Path

from async_rl.config import Config
from async_rl.errors import ConfigError
from async_rl.launch import fleet_plan
from async_rl.launch.fleet_plan import GangPlan
from async_rl.plan.learner_sizes import learner_sizes

CONTINUES = 75
"""Exit code of a process that ended because its job's time is nearly over."""

PREEMPTED = 76
"""Exit code of a process that ended because Slurm takes its job's nodes for another job."""

LEFT_ALONE_S = 60
"""Seconds that the ranks on other nodes get to end by themselves after those on one node ended."""

STABLE_S = 600
RESTARTS = 3
"""How many times in a row a job is queued again that was killed within STABLE_S of its start."""

KINDS = ("learner", "worker", "evaluator")

_ONE_PER_NODE = "--ntasks-per-node=1"
"""Option of srun: sbatch, given a range of nodes and this option, takes the fewest."""

_OUTPUT = {"learner": "learner-%j.log", "worker": "worker-%a.log", "evaluator": "evaluator.log"}

_ABOUT = {
    "learner": """\
# The learner of run {run}. Before the time limit Slurm sends USR1: the learner writes a checkpoint, and the next job of its
# chain resumes from it. After its last step it cancels what is left of the run in the queue.""",
    "worker": """\
# The rollout workers of run {run}, one for each task of the array. Before the time limit Slurm sends USR1: a worker drains and
# is queued again, unless the queue has no learner job of the run any more. After TERM it drains and ends.""",
    "evaluator": """\
# The evaluator of run {run}. Before the time limit Slurm sends USR1: it ends and is queued again, as workers are.""",
}

_KILLED = f"""\
  137)  # killed: queued again, but not for ever if that comes soon after each start
    kills="slurm/killed-$SLURM_JOB_ID"
    ((SECONDS < {STABLE_S})) || rm -f "$kills"
    echo killed >> "$kills"
    if (($(wc -l < "$kills" || echo 0) <= {RESTARTS})); then exec scontrol requeue "$SLURM_JOB_ID"; fi ;;"""

_REQUEUED = f"""\
  {CONTINUES} | {PREEMPTED} | 138) exec scontrol requeue "$SLURM_JOB_ID" ;;  # time nearly over, or preempted
{_KILLED}"""

_AFTER = {
    "learner": f"""\
  {CONTINUES}) exit 0 ;;  # time is nearly over: the next job of the chain goes on
  {PREEMPTED} | 138) exec scontrol requeue "$SLURM_JOB_ID" ;;  # preempted
{_KILLED}""",
    "worker": _REQUEUED,
    "evaluator": _REQUEUED,
}


def job_name(config: Config, kind: str) -> str:
    return f"{config.run.name}-{kind}"


def kind_of(config: Config, name: str) -> str:
    """The kind of process that a job of this name runs; its name if the run has none such."""
    return next((kind for kind in KINDS if job_name(config, kind) == name), name)


def own_options(config: Config, kind: str) -> list[str]:
    """The options that the configuration gives the jobs of this kind."""
    given = config.launch.slurm
    return [*given.options, *(given.learner_options if kind == "learner" else given.worker_options)]


def partitions_of(options: Iterable[str]) -> list[str]:
    """The partitions that options of sbatch name. Empty: none, jobs go to the default one."""
    named = _named(options).partition
    return named.split(",") if named else []


def check_options(config: Config) -> None:
    """Refuse options that hide jobs of the run from `fleet` and from each other. Raises ConfigError."""
    named = [_named(own_options(config, kind)) for kind in KINDS]
    if any(each.job_name or each.chdir for each in named):
        raise ConfigError(
            "launch.slurm options: the jobs of a run are found by their names and by their working directory; take out "
            "--job-name (-J) and --chdir (-D), and choose run.name and run.folder"
        )


def _named(options: Iterable[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    for names in (("-p", "--partition"), ("-J", "--job-name"), ("-D", "--chdir")):
        parser.add_argument(*names)
    try:
        return parser.parse_known_args([word for option in options for word in shlex.split(option)])[0]
    except (ValueError, argparse.ArgumentError) as error:
        raise ConfigError(f"launch.slurm options: {error}") from error


def scripts(config: Config, *, on_gpus: Collection[str]) -> dict[str, str]:
    """The script of each kind of process. `on_gpus`: the kinds whose jobs may ask for GPUs. Raises ConfigError if the learner's
    ranks cannot be divided over its machines."""
    _check_sizes(config)
    plans = {
        "learner": fleet_plan.learner(config, has_gpus="learner" in on_gpus),
        "worker": fleet_plan.worker(config, 0, has_gpus="worker" in on_gpus),
        **({"evaluator": fleet_plan.evaluator(config, has_gpus="evaluator" in on_gpus)} if config.evaluation.every else {}),
    }
    return {kind: _script(config, kind, plan) for kind, plan in plans.items()}


def _check_sizes(config: Config) -> None:
    most, fewest = config.launch.learner_nodes, config.launch.fewest_nodes
    if missing := set(range(fewest, most + 1)) - set(learner_sizes(config)):
        raise ConfigError(
            f"launch.learner_nodes_min ({fewest}): Slurm may give any number of nodes up to {most}, but {min(missing)} cannot "
            "hold whole copies of the model (learner.parallel); raise it"
        )


def _script(config: Config, kind: str, plan: GangPlan) -> str:
    folder = config.run_folder
    options = [
        f"--job-name={job_name(config, kind)}",
        f"--chdir={shlex.quote(str(folder))}",
        f"--output={shlex.quote(str(folder / 'logs' / _OUTPUT[kind]))}",
        "--open-mode=append",
        "--requeue",
        f"--signal=USR1@{config.launch.slurm.warn_s}",
        *_places(plan, fewest=config.launch.fewest_nodes if plan.is_elastic else len(plan.members)),
        *own_options(config, kind),
    ]
    words = [sys.executable, "-P", "-m", "async_rl.launch.slurm.member", kind, "@", str(folder / "config.yaml")]
    return "\n".join(
        [
            "#!/bin/bash",
            _ABOUT[kind].format(run=config.run.name),
            *(f"#SBATCH {option}" for option in options),
            "",
            *config.launch.slurm.setup,
            f'srun --wait={LEFT_ALONE_S} {_ONE_PER_NODE} --cpus-per-task="$SLURM_CPUS_PER_TASK" {shlex.join(words)}',
            "status=$?",
            "case $status in",
            _AFTER[kind],
            "esac",
            "exit $status",
            "",
        ]
    )


def _places(plan: GangPlan, *, fewest: int) -> list[str]:
    """A task on each of the plan's machines, or on as many of them as there are, with what it needs."""
    resources = plan.members[0].resources
    generic = {name: number for name, number in resources.items() if name not in ("CPU", "GPU")}
    if not any(name.startswith("gpu:") for name in generic):  # a kind of GPU, named as Slurm does, replaces any GPU
        generic["gpu"] = resources["GPU"]
    wanted = ",".join(f"{name}:{number:g}" for name, number in generic.items() if number)
    return [
        f"--nodes={len(plan.members)}" if fewest == len(plan.members) else f"--nodes={fewest}-{len(plan.members)}",
        f"--cpus-per-task={max(1, round(resources['CPU']))}",
        *([f"--gres={wanted}"] if wanted else []),
    ]


def write_scripts(config: Config, *, on_gpus: Collection[str]) -> dict[str, Path]:
    """Write the scripts into the run's folder and return their paths, by kind of process."""
    folder = config.run_folder / "slurm"
    folder.mkdir(exist_ok=True)
    (config.run_folder / "logs").mkdir(exist_ok=True)  # Slurm does not create it
    paths: dict[str, Path] = {}
    for kind, text in scripts(config, on_gpus=on_gpus).items():
        paths[kind] = folder / f"{kind}.sbatch"
        paths[kind].write_text(text)
    return paths
