"""`python -P -m buffer VERB @ config.yaml`: serve the run's Redis, or inspect and change what it holds.

async_rl/cli/buffer.py defines the verbs and their options, buffer/tools/ implements them.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence

from async_rl.cli.buffer import find, listing
from async_rl.cli.grammar import CommandLine, manual, read
from async_rl.config import Config
from async_rl.config.loading import load_unfetched
from async_rl.durable.private_files import keep_files_private
from async_rl.errors import ConfigError, boundary
from async_rl.supervision import signs_of_life
from async_rl.telemetry import configure_logs
from buffer.server.embedded.server import EmbeddedServer

HELP = ("-h", "--help")
ALSO = ("env", "weights", "fleet")
"""Families of verbs that this process implements beside `buffer`."""


def main(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0] in HELP:
        print(listing())
        return 0 if arguments else ConfigError.exit_code
    verb, rest = find(arguments)
    if any(word in HELP for word in rest):
        print(manual(verb))
        return 0
    line = read(verb, rest)
    config = _config(line)
    if verb.words == "buffer serve":
        configure_logs("buffer", run_folder=config.run_folder)
        keep_files_private()
        with signs_of_life(os.environ):
            return asyncio.run(_serve(config))
    code = _use(config, line)
    return code if code is not None else 0


def _config(line: CommandLine) -> Config:
    """The configuration that a line names by its file, or by the Redis that the run's learner left it in."""
    if (address := line.text("address")) is None:
        return load_unfetched(line.config)
    from buffer.joining import joined

    return joined(address, line.config).config


async def _serve(config: Config) -> int:
    """Serve until SIGTERM or SIGINT; stopping is quick, so a second signal changes nothing."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with EmbeddedServer(config) as server:
        print(f"redis serves run {config.run.name!r} at {config.redis_url} (process {server.pid})", flush=True)
        await stop.wait()
    return 0


def _use(config: Config, line: CommandLine) -> int | None:
    from buffer.tools.verbs import ON_FILES  # imported here, so that `serve` does not load them

    if line.verb.words in ON_FILES:
        return ON_FILES[line.verb.words](config, line)
    try:
        return asyncio.run(_use_on_a_run(config, line))
    except KeyboardInterrupt:
        if line.verb.words != "buffer tail" and not line.has("watch"):  # Ctrl-C is how watching ends
            raise


async def _use_on_a_run(config: Config, line: CommandLine) -> int | None:
    from buffer.tools.open_run import open_run
    from buffer.tools.verbs import ON_A_RUN

    async with open_run(config) as run:
        return await ON_A_RUN[line.verb.words](run, line)


if __name__ == "__main__":
    with boundary(next((family for family in ALSO if sys.argv[1:2] == [family]), "buffer")):
        try:
            raise SystemExit(main(sys.argv[1:]))
        except BrokenPipeError:  # the reader has closed the pipe, as in `buffer ls | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise SystemExit(0) from None
