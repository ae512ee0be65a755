"""Replaces this process by a role's, so that signals and the exit code are the role's own."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from async_rl.cli.grammar import CommandLine
from async_rl.config.loading import load_unfetched
from async_rl.launch.commands import Role, command, environment

if TYPE_CHECKING:
    from async_rl.config.training import AnyRun


def become(command_line: list[str], config: AnyRun | None = None) -> NoReturn:
    """Replace this process by the command; with `config`, in the environment that the run needs."""
    sys.stdout.flush()
    os.execve(command_line[0], command_line, environment(config, os.environ) if config is not None else os.environ)


def in_role(role: Role, *words: str) -> Callable[[CommandLine], int]:
    """A verb's `run`: become the role, with `words` before those that were typed. The run must have a name; its models are not
    fetched."""

    def run(line: CommandLine) -> NoReturn:
        become(command(role, [*words, *line.words]), load_unfetched(line.config))

    return run


def in_buffer(line: CommandLine) -> NoReturn:
    """A verb's `run`: the buffer's process does it."""
    words = line.verb.words.removeprefix("buffer ").split()
    become(command("buffer", [*words, *line.words]), load_unfetched(line.config))
