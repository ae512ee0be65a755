"""The server role: an EmbeddedServer, as `async-rl run` starts it. SIGUSR1 makes it kill -9 its server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal

from buffer.server.client import Server
from buffer.server.embedded.server import EmbeddedServer
from tests.chaos.stage import SERVING, Stage, stop_event


async def keep_server(stage: Stage) -> None:
    stop, killed = stop_event(), asyncio.Event()
    async with EmbeddedServer(stage.config) as embedded:

        def kill() -> None:
            with contextlib.suppress(ProcessLookupError):  # it is being restarted
                if os.getsid(embedded.pid) == embedded.pid:  # a server leads its session, so this is not another process
                    os.kill(embedded.pid, signal.SIGKILL)
            killed.set()

        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, kill)
        async with asyncio.TaskGroup() as tasks:
            telling = tasks.create_task(_tell(stage, killed), name="tell")
            await stop.wait()
            telling.cancel()


async def _tell(stage: Stage, killed: asyncio.Event) -> None:
    """Report an act whenever the server answers again."""
    server = Server(stage.config.redis_url, patience_s=60)
    try:
        while True:
            await server.ping()
            stage.set_state(SERVING)
            stage.report_act()
            await killed.wait()
            killed.clear()
    finally:
        await server.close()
