"""`async-rl eval` and `evaluator`; rollout_workers/evaluation does the work."""

from __future__ import annotations

from typing import NoReturn

from async_rl.cli.grammar import CommandLine, Verb
from async_rl.cli.role_process import become
from async_rl.cli.run import load_with_name
from async_rl.config.loading import load, load_named
from async_rl.errors import ConfigError
from async_rl.launch.commands import SCHEDULED, command
from async_rl.launch.run_folder import make_run_folder


def evaluate(line: CommandLine) -> NoReturn:
    """WHAT is interpreted where it can be read: in the process that this one becomes."""
    what, words = line.operands[0] if line.operands else "", line.config
    config = load(words)
    if what and what != "live" and not config.run.name:  # the answers need a folder, and no other process has to find it
        config = load_with_name(words)
        words = (*words, "--run.name", config.run.name)
    if config.run.name:
        make_run_folder(config.run_folder)
    become(command("rollout_workers.evaluation", [what, *words]), config)


def evaluate_repeatedly(line: CommandLine) -> NoReturn:
    config = load_named(line.config)
    if not config.evaluation.every:
        raise ConfigError("evaluation.every is 0, so there is nothing to evaluate; set it to a number of steps")
    make_run_folder(config.run_folder)
    become(command("rollout_workers.evaluation", [SCHEDULED, *line.words]), config)


EVAL = Verb(
    words="eval",
    operands="[WHAT]",
    help="Evaluate a checkpoint, a Hugging Face folder, a served model or a live run.",
    run=evaluate,
    config="@ FILE",
    details="""\
WHAT is one of
  (nothing)    the newest checkpoint of the run
  FOLDER       a checkpoint, a folder of checkpoints, or a Hugging Face model
  live         one version of the running run, while it goes on training
  NAME         a model under `policies:`
  http://...   an OpenAI-compatible server

The `evaluation` section sets tasks, samples and environments. Prints a table; it is also written, with all rollouts, to eval/
in the run's folder.""",
)
EVALUATOR = Verb(
    words="evaluator", help="Evaluate a live run every evaluation.every steps.", run=evaluate_repeatedly, config="@ FILE"
)
VERBS = (EVALUATOR, EVAL)
