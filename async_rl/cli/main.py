"""The `async-rl` command. It imports no role: each is a process of its own, started with `python -P -m`."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from difflib import get_close_matches
from functools import partial
from typing import NoReturn

import async_rl
from async_rl.cli import buffer as buffer_verbs
from async_rl.cli import checkpoints as checkpoint_verbs
from async_rl.cli import env as env_verbs
from async_rl.cli import eval as eval_verbs
from async_rl.cli import grammar as verb_line
from async_rl.cli import model as model_verbs
from async_rl.cli import reward as reward_verbs
from async_rl.cli import train as training_verbs
from async_rl.cli.first_lines import first_lines
from async_rl.config import Config
from async_rl.config.loading import DEFAULT, leaves, load, load_named, load_with_origins, parse, to_show
from async_rl.config.training import AnyRun
from async_rl.errors import ConfigError, boundary
from async_rl.launch.commands import SCHEDULED, Role, command, environment, ranks_command
from async_rl.launch.package_guard import guard
from async_rl.launch.run_folder import make_run_folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Verb:
    words: str
    help: str
    run: Callable[[Sequence[str]], int]
    manual: str = ""
    """What --help prints, where the help alone is too short."""


def main() -> NoReturn:
    with boundary("async-rl"):
        raise SystemExit(dispatch(sys.argv[1:]))


def dispatch(args: Sequence[str]) -> int:
    if not args or args[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    if args[0] in ("-V", "--version"):
        print(f"async-rl {async_rl.__version__}")
        return 0
    for verb in VERBS:
        words = verb.words.split()
        if list(args[: len(words)]) == words:
            rest = args[len(words) :]
            if any(word in ("-h", "--help") for word in rest):
                print(verb.manual if verb.manual else f"async-rl {verb.words} {ARGUMENTS}\n\n{verb.help}")
                return 0
            return verb.run(rest)
    raise ConfigError(_unknown(args))


def usage() -> str:
    width = max(len(verb.words) for verb in VERBS)
    verbs = "\n".join(f"  {verb.words:<{width}}  {verb.help}" for verb in VERBS)
    return f"""\
async-rl VERB {ARGUMENTS}

{verbs}

  @ FILE         a YAML file; several are merged in order
  --KEY VALUE    one value by its dotted key, for example: --staleness.max_age 4

To begin: async-rl run @ configs/quickstart.yaml"""


def run(args: Sequence[str]) -> int:
    from async_rl.cli.run_summary import write_summary
    from async_rl.launch import local as local_run
    from async_rl.telemetry import configure_logs

    started = time.monotonic()
    guard()
    config = named(args)
    configure_logs("run")
    with local_run.sole_run(config):
        print(first_lines(config), flush=True)
        local_run.prepare_folder(config)
        code = asyncio.run(local_run.run(config, os.environ))
    if code == 0:
        from rich.console import Console

        write_summary(config, Console(), wall_s=time.monotonic() - started)
    return code


def named(args: Sequence[str]) -> Config:
    """The configuration; a run without a name is called after its last file and the time."""
    config = load(args)
    if config.run.name:
        return config
    files, _ = parse(args)
    stem = files[-1].stem if files else "run"
    return load([*args, "--run.name", f"{stem}-{datetime.now(UTC):%Y%m%d-%H%M%S}"])


def role(module: Role, *words: str) -> Callable[[Sequence[str]], int]:
    """This process becomes the role, so that its signals and its exit code are the role's own."""

    def become(args: Sequence[str]) -> int:
        guard()
        config = load_named(args)
        _become(command(module, [*words, *args]), config)

    return become


def learner(args: Sequence[str]) -> NoReturn:
    """The learner's only rank, the parent of all its ranks, or one of the ranks that another launcher starts."""
    guard()
    config = load_named(args)
    make_run_folder(config.run_folder)
    is_one_of_several = "WORLD_SIZE" in os.environ
    if os.environ.get("RANK", "0") == "0":
        print(first_lines(config))
    _become(command("learner", args) if is_one_of_several else ranks_command("learner", args, config), config)


def tool(chosen: verb_line.Tool) -> Callable[[Sequence[str]], int]:
    """The buffer's process does it; what is wrong with the line is said before it starts."""

    def become(args: Sequence[str]) -> int:
        guard()
        config = load_named(verb_line.read(chosen, args).config)
        role = "rollout_workers.attaching" if chosen.words == "env attach" else "buffer"
        _become(command(role, [*chosen.words.split(), *args]), config)

    return become


def audit(args: Sequence[str]) -> int:
    guard()
    _become(command("buffer.run_audit", args), load_named(verb_line.read(buffer_verbs.RUN_AUDIT, args).config))


def evaluate(args: Sequence[str]) -> int:
    """What is evaluated is found where it can be read: in the process that this one becomes."""
    guard()
    word, described = eval_verbs.split(args)
    config = load(described)
    if word and word != "live" and not config.run.name:  # the answers need a folder, and nobody else has to find them
        config = named(described)
        described = [*described, "--run.name", config.run.name]
    if config.run.name:
        make_run_folder(config.run_folder)
    _become(command("rollout_workers.evaluation", [word, *described]), config)


def evaluator(args: Sequence[str]) -> int:
    guard()
    config = load_named(args)
    if not config.evaluation.every:
        raise ConfigError("evaluation.every is 0, so there is nothing to evaluate; set it to a number of steps")
    make_run_folder(config.run_folder)
    _become(command("rollout_workers.evaluation", [SCHEDULED, *args]), config)


def env_check(args: Sequence[str]) -> int:
    guard()
    config = load(env_verbs.config_words(verb_line.read(env_verbs.CHECK, args)))
    _become(command("rollout_workers.checking", args), config)


def env_serve(args: Sequence[str]) -> NoReturn:
    """No run is needed: this may be a machine, or a virtual environment, that holds nothing but the environment."""
    guard()
    verb_line.read(env_verbs.SERVE, args)
    _execute(command("rollout_workers.remote", args))


def model(chosen: verb_line.Tool) -> Callable[[Sequence[str]], int]:
    def become(args: Sequence[str]) -> NoReturn:
        guard()
        verb_line.read(chosen, args)
        _execute(command("learner.models", [*chosen.words.split()[1:], *args]))

    return become


def reward(args: Sequence[str]) -> NoReturn:
    guard()
    config = training_verbs.load_described(verb_line.read(reward_verbs.SERVE, args).config)
    _become(command("rollout_workers.reward_model", args), config)


def any_tool(args: Sequence[str]) -> int:
    """Reached by `async-rl buffer` alone, and by words that no tool has."""
    if args:
        buffer_verbs.find(args)
    print(buffer_verbs.listing())
    return 0


def _execute(line: list[str]) -> NoReturn:
    sys.stdout.flush()
    os.execv(line[0], line)


def _become(line: list[str], config: AnyRun) -> NoReturn:
    sys.stdout.flush()
    os.execve(line[0], line, environment(config, os.environ))


def config_show(args: Sequence[str]) -> int:
    loaded = load_with_origins(args)
    shown = [(".".join(keys), json.dumps(value)) for keys, value in leaves(to_show(loaded.config))]
    key_width, value_width = (max(len(cells[column]) for cells in shown) for column in (0, 1))
    for key, value in shown:
        origin = loaded.origins[key]
        note = "" if origin == DEFAULT else f"  # {origin}"
        print(f"{key:<{key_width}}  {value:<{min(value_width, 40)}}{note}".rstrip())
    return 0


def config_schema(args: Sequence[str]) -> int:
    if args:
        raise ConfigError("config schema takes no arguments")
    print(json.dumps(Config.model_json_schema(), indent=2))
    return 0


def config_check(args: Sequence[str]) -> int:
    config = load(args)
    print(
        f"ok: at most {config.limits.slots} groups of {config.batch.group_size} rollouts exist at once, none older than "
        f"{config.limits.age_bound} when trained"
    )
    return 0


ARGUMENTS = "[@ FILE]... [--KEY VALUE]..."

VERBS = (
    Verb(words="run", help="Start everything on this machine: buffer, learner and workers; sum up at the end.", run=run),
    Verb(
        words="learner",
        help="Be the learner: all ranks that learner.parallel asks for, or the one that WORLD_SIZE and RANK name.",
        run=learner,
    ),
    Verb(words="worker", help="Be one rollout worker.", run=role("rollout_workers")),
    Verb(words="reward serve", help=reward_verbs.SERVE.help, run=reward, manual=verb_line.manual(reward_verbs.SERVE)),
    *(
        Verb(words=f"train {method}", help=help, run=partial(training_verbs.run, method))
        for method, help in training_verbs.HELP.items()
    ),
    Verb(words="evaluator", help="Evaluate a live run again and again, every evaluation.every steps.", run=evaluator),
    Verb(words="eval", help=eval_verbs.HELP, run=evaluate, manual=eval_verbs.MANUAL),
    Verb(words="env check", help=env_verbs.CHECK.help, run=env_check, manual=verb_line.manual(env_verbs.CHECK)),
    Verb(words="env serve", help=env_verbs.SERVE.help, run=env_serve, manual=verb_line.manual(env_verbs.SERVE)),
    *(Verb(words=each.words, help=each.help, run=model(each), manual=verb_line.manual(each)) for each in model_verbs.TOOLS),
    *(
        Verb(words=each.words, help=each.help, run=run, manual=verb_line.manual(each))
        for each, run in checkpoint_verbs.VERBS.items()
    ),
    Verb(words="audit", help=buffer_verbs.RUN_AUDIT.help, run=audit, manual=verb_line.manual(buffer_verbs.RUN_AUDIT)),
    *(Verb(words=each.typed, help=each.help, run=tool(each), manual=verb_line.manual(each)) for each in buffer_verbs.TOOLS),
    Verb(words="buffer", help="List these verbs.", run=any_tool, manual=f"List these verbs.\n\n{buffer_verbs.listing()}"),
    Verb(words="ctl show", help="Print the limits in force.", run=tool(buffer_verbs.LIMITS)),
    Verb(words="ctl set", help="Change limits while the run goes on: KEY=VALUE ...", run=tool(buffer_verbs.LIMITS)),
    Verb(words="config show", help="Print every value and where it came from.", run=config_show),
    Verb(words="config schema", help="Print the JSON schema of a configuration file, for editors.", run=config_schema),
    Verb(words="config check", help="Say whether a configuration is valid.", run=config_check),
)


def _unknown(args: Sequence[str]) -> str:
    known = [verb.words for verb in VERBS]
    asked = " ".join(args[:2]) if any(words.startswith(f"{args[0]} ") for words in known) else args[0]
    starting = [words for words in known if words.startswith(f"{args[0]} ")]
    nearest = get_close_matches(asked, known, n=1) or starting
    if not nearest:
        return f"there is no verb {asked!r}; `async-rl --help` lists them"
    return f"there is no verb {asked!r}; did you mean {' or '.join(f'`async-rl {words}`' for words in nearest)}?"
