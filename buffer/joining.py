"""`python -P -m buffer.joining ADDRESS [@ FILE] [--KEY VALUE]...`: `async-rl worker --join`. Reads the run's configuration from
its Redis, checks what it asks of this machine, and becomes a worker with it.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Sequence

from pydantic import BaseModel

from async_rl.board import shared_config
from async_rl.cli.role_process import become
from async_rl.config import Config
from async_rl.config.buffer import RedisConfig
from async_rl.config.loading import LoadedConfig, load_over, to_yaml
from async_rl.config.located_yaml import DEFAULT
from async_rl.config.run import RunConfig
from async_rl.durable.private_files import keep_files_private
from async_rl.errors import ConfigError, boundary
from async_rl.launch.commands import HAS_JOINED, command
from async_rl.launch.package_guard import guard
from buffer.board import RedisBoard
from buffer.server.addresses import parse_address
from buffer.server.client import open_server
from buffer.server.users import run_of


class _Own(BaseModel):
    """What leads to the run's configuration. Other keys are checked with it."""

    run: RunConfig = RunConfig()
    redis: RedisConfig = RedisConfig()


def main() -> None:
    guard()
    keep_files_private()
    address, *words = sys.argv[1:]
    os.environ[HAS_JOINED] = "1"
    config = shared_config.refuse_foreign(joined(address, words))
    become(command("rollout_workers", ["@", _in_memory(to_yaml(config))]), config)


def joined(address: str, words: Sequence[str]) -> LoadedConfig[Config]:
    """The configuration of a process that joins the run at an address. Raises ConfigError, BufferUnreachable, FleetMismatch."""
    words = [*words, "--redis.url", address]
    own = load_over(_Own, {}, DEFAULT, words).config
    user = own.redis.user if own.redis.user else parse_address(address).user
    name = own.run.name if own.run.name else run_of(user if user is not None else "")
    if not name:
        raise ConfigError(
            "the address does not tell which run is meant: add its user, as in rediss://RUN-worker@HOST:6379, or --run.name RUN"
        )
    return shared_config.read_shared(asyncio.run(_note(own.redis, name)), name, words)


async def _note(redis: RedisConfig, run: str) -> bytes | None:
    async with open_server(redis) as server:
        return await RedisBoard(server, run).note(shared_config.NOTE)


def _in_memory(text: str) -> str:
    """Path of a file without a name, which ends with the process that this one becomes."""
    with tempfile.TemporaryFile("w", encoding="utf-8") as file:
        file.write(text)
        file.seek(0)
        os.set_inheritable(descriptor := os.dup(file.fileno()), True)
    return f"/dev/fd/{descriptor}"


if __name__ == "__main__":
    with boundary("async-rl worker"):
        main()
