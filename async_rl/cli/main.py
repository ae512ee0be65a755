"""The `async-rl` command. It imports no role: each is a process of its own, started with `python -P -m`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from difflib import get_close_matches
from typing import NoReturn

import async_rl
from async_rl.cli import audit, buffer, checkpoints, config, env, eval, model, reward, run, train, weights
from async_rl.cli.grammar import manual, read
from async_rl.errors import ConfigError, boundary
from async_rl.launch.package_guard import guard

VERBS = (
    *run.VERBS,
    *reward.VERBS,
    *train.VERBS,
    *eval.VERBS,
    *env.VERBS,
    *model.VERBS,
    *checkpoints.VERBS,
    *audit.VERBS,
    *weights.VERBS,
    *buffer.VERBS,
    *config.VERBS,
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
    for verb in VERBS:
        words = verb.words.split()
        if list(args[: len(words)]) == words:
            rest = args[len(words) :]
            if any(word in HELP for word in rest):
                print(manual(verb))
                return 0
            return verb.run(read(verb, rest))
    raise ConfigError(_unknown(args))


def usage() -> str:
    width = max(len(verb.words) for verb in VERBS)
    verbs = "\n".join(f"  {verb.words:<{width}}  {verb.help}" for verb in VERBS)
    return f"""\
async-rl VERB [@ FILE]... [--KEY VALUE]...

{verbs}

  @ FILE         a YAML file; several are merged in order
  --KEY VALUE    one value by its dotted key, for example: --staleness.max_age 4

To begin: async-rl run @ configs/quickstart.yaml"""


def _unknown(args: Sequence[str]) -> str:
    known = [verb.words for verb in VERBS]
    asked = " ".join(args[:2]) if any(words.startswith(f"{args[0]} ") for words in known) else args[0]
    starting = [words for words in known if words.startswith(f"{args[0]} ")]
    nearest = get_close_matches(asked, known, n=1) or starting
    if not nearest:
        return f"there is no verb {asked!r}; `async-rl --help` lists them"
    return f"there is no verb {asked!r}; did you mean {' or '.join(f'`async-rl {words}`' for words in nearest)}?"
