"""The composition root of `async-rl view`: the page of a run, with its Redis where it lives."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

from async_rl.cli.grammar import CommandLine, read
from async_rl.cli.view import VIEW
from async_rl.config import Config
from async_rl.config.exposure import is_loopback, read_token
from async_rl.errors import ConfigError, boundary
from async_rl.launch.package_guard import guard as refuse_intruders
from async_rl.supervision import drain_on_signals
from async_rl.telemetry import configure_logs
from async_rl.view.demo import write_demo
from async_rl.view.guard import new_token
from async_rl.view.opened_run import OpenedRun, open_described, open_folder
from async_rl.view.run_view import RunView
from async_rl.view.server import ViewServer, serving
from buffer.view.live_run import RedisLiveSource


def main(words: Sequence[str]) -> None:
    refuse_intruders()
    line = read(VIEW, words)
    configure_logs("view")
    with ExitStack() as opened:
        if line.has("demo"):
            folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="async-rl-demo-"))) / "demo"
            write_demo(folder)
            write_demo(folder.with_name("demo-before"), steps=1200, seed=1)
            run = open_folder(folder)
        else:
            run = chosen_run(line)
        asyncio.run(serve(run, line))


def chosen_run(line: CommandLine) -> OpenedRun:
    """The run that the line names, by its folder or by a configuration."""
    if line.operands and line.config:
        raise ConfigError("name the run's folder or its configuration (@ FILE), not both")
    if line.operands:
        return open_folder(Path(line.operands[0]))
    if not line.config:
        raise ConfigError("which run? async-rl view runs/NAME, or async-rl view @ runs/NAME/config.yaml; --demo shows one")
    return open_described(line.config)


async def serve(run: OpenedRun, line: CommandLine) -> None:
    stop = drain_on_signals()
    host, given = line.text("host", "127.0.0.1"), read_token(line.text("token-file"), key="--token-file")
    async with AsyncExitStack() as opened:
        live = await opened.enter_async_context(RedisLiveSource(run.config)) if isinstance(run.config, Config) else None
        view = RunView(run, live)
        view.rollouts.read_index()
        view.refresh()  # takes seconds for a long run, of which no request has to wait
        routes = ViewServer(view).routes
        token = given if given else new_token()
        url = await opened.enter_async_context(serving(routes, host=host, port=line.integer("port", 0), token=token))
        beyond = "" if is_loopback(host) else " (without encryption: the token is for private networks)"
        print(f"view of run {run.name}: {url}{beyond}", flush=True)
        await stop.wait()


if __name__ == "__main__":
    with boundary("async-rl view"):
        main(sys.argv[1:])
