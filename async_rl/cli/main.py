"""The `async-rl` command. It imports no role: each is a process of its own, started with `python -P -m`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn

import async_rl
from async_rl.cli import (
    audit,
    buffer,
    checkpoints,
    config,
    doctor,
    env,
    eval,
    fleet,
    launch,
    metrics_page,
    model,
    rehearse,
    reward,
    run,
    runs,
    simulate,
    top,
    trace,
    train,
    verbs_page,
    view,
    weights,
)
from async_rl.cli.grammar import aligned, find_verb, manual, read, unknown_verb
from async_rl.errors import ConfigError, boundary
from async_rl.launch.package_guard import guard

VERBS = (
    *run.VERBS,
    *launch.VERBS,
    *fleet.VERBS,
    *doctor.VERBS,
    *rehearse.VERBS,
    *simulate.VERBS,
    *top.VERBS,
    *runs.VERBS,
    *reward.VERBS,
    *train.VERBS,
    *eval.VERBS,
    *env.VERBS,
    *model.VERBS,
    *checkpoints.VERBS,
    *audit.VERBS,
    *view.VERBS,
    *trace.VERBS,
    *weights.VERBS,
    *buffer.VERBS,
    *config.VERBS,
    *metrics_page.VERBS,
    *verbs_page.VERBS,
)
HELP = ("-h", "--help")


def main() -> NoReturn:
    with boundary("async-rl"):
        guard()
        raise SystemExit(dispatch(sys.argv[1:]))


def dispatch(args: Sequence[str]) -> int:
    """Run the verb that the line begins with and return the exit code. Raises AsyncRLError."""
    if not args or args[0] in (*HELP, "help"):
        print(usage())
        return 0
    if args[0] in ("-V", "--version"):
        print(f"async-rl {async_rl.__version__}")
        return 0
    found = find_verb(VERBS, args)
    if found is None:
        raise ConfigError(unknown_verb(VERBS, args[:2]))
    verb, rest = found
    if any(word in HELP for word in rest):
        print(manual(verb))
        return 0
    return verb.run(read(verb, rest))


def usage() -> str:
    return f"""\
async-rl VERB [@ FILE]... [--KEY VALUE]...

{aligned({verb.words: verb.help for verb in VERBS})}

  @ FILE         a YAML file; several are merged in order
  --KEY VALUE    one value by its dotted key, for example: --staleness.max_age 4

To begin: async-rl run @ configs/quickstart.yaml"""
