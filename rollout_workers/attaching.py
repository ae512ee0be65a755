"""`async-rl env attach`: make the environment here first, so that a mistake is reported before any worker sees it.

The change itself is a command of the buffer's tools, which this process then executes in its own place.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence

from async_rl.board.attached_code import refuse_foreign_code
from async_rl.cli.buffer import find
from async_rl.cli.env import section_of
from async_rl.cli.grammar import read
from async_rl.config.loading import load_unfetched
from async_rl.errors import ConfigError, boundary
from async_rl.launch.commands import command
from async_rl.protocols import Agent
from rollout_workers.environment_pool import opened
from rollout_workers.registry import build_agent
from rollout_workers.user_functions import awaited


def main(words: Sequence[str]) -> None:
    line = read(*find(words))
    section, config = section_of(line), load_unfetched(line.config)
    refuse_foreign_code(section, config.environments, config.environments_from)
    if not line.has("unchecked"):
        agent = build_agent(section, config.run.seed)
        try:
            asyncio.run(pose_first_task(agent))
        except ConfigError:
            raise
        except Exception as error:  # user code may raise anything
            raise ConfigError(
                f"{section.label} cannot pose its first task ({type(error).__name__}: {error}); "
                "`async-rl env check` plays it, and --unchecked attaches it all the same"
            ) from error
    os.execv(sys.executable, command("buffer", words))


async def pose_first_task(agent: Agent) -> None:
    async with opened(agent):
        await awaited(agent.task(0))


if __name__ == "__main__":
    with boundary("async-rl env attach"):
        main(sys.argv[1:])
