"""What people can type after `async-rl eval`: a word that says what is evaluated, anywhere among the configuration's words."""

from __future__ import annotations

from collections.abc import Sequence

from async_rl.errors import ConfigError

HELP = "Evaluate a checkpoint, a Hugging Face folder, a served model or a live run."

MANUAL = f"""\
async-rl eval [WHAT] [@ FILE]... [--KEY VALUE]...

{HELP}

WHAT is one of
  (nothing)    the newest checkpoint of the run
  FOLDER       a checkpoint, a folder of them, or a Hugging Face model
  live         the run as it trains now: one version of it, while training goes on
  NAME         a model under `policies:`
  http://...   any OpenAI-compatible server

How many tasks and samples, and of which environments, stands under `evaluation:`. A table is printed; it lies with all
answers in the run's folder, eval/."""


def split(args: Sequence[str]) -> tuple[str, list[str]]:
    """The word, empty if there is none, and the rest. Raises ConfigError when there are two."""
    found: list[str] = []
    rest: list[str] = []
    words = iter(args)
    for word in words:
        if word == "@" or (word.startswith("--") and "=" not in word):
            rest += [word, *([value] if (value := next(words, None)) is not None else [])]
        elif word.startswith(("@", "--")):
            rest.append(word)
        else:
            found.append(word)
    if len(found) > 1:
        raise ConfigError(f"async-rl eval evaluates one thing at a time, and was given {' and '.join(map(repr, found))}")
    return found[0] if found else "", rest
