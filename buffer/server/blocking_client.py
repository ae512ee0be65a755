"""A `Server` for threads without an event loop: runs an event loop on a thread of its own and calls it from there.

Addresses, TLS, Sentinels and retries are thereby those of client.py.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from typing import Any, TypeVar

from async_rl.config import Config
from buffer.server.client import Server, open_server

T = TypeVar("T")


class BlockingServer:
    def __init__(self, server: Server, loop: asyncio.AbstractEventLoop) -> None:
        self._server = server
        self._loop = loop
        self._closing = threading.Lock()
        self._is_closed = False

    def call(self, ask: Callable[[Server], Coroutine[Any, Any, T]], *, within_s: float) -> T:
        """Run `ask` on the event loop and block for its result. Raises TimeoutError after `within_s`, and CancelledError if
        the server is closed before or meanwhile.
        """

        async def bounded() -> T:
            async with asyncio.timeout(within_s):
                return await ask(self._server)

        with self._closing:  # a loop that has ended would drop the call, and its caller would wait for ever
            if self._is_closed:
                raise CancelledError
            asked = asyncio.run_coroutine_threadsafe(bounded(), self._loop)
        try:
            return asked.result()
        finally:
            asked.cancel()  # a signal handler may have raised here

    def close(self) -> None:
        with self._closing:
            self._is_closed = True


@contextmanager
def open_blocking_server(config: Config) -> Generator[BlockingServer]:
    """Connect to the run's Redis. On exit calls that still wait are cancelled. Raises BufferUnreachable."""
    opened: Future[tuple[BlockingServer, Callable[[], object]]] = Future()

    async def serve() -> None:
        stopping = asyncio.Event()
        loop = asyncio.get_running_loop()
        async with open_server(config) as server:
            opened.set_result((BlockingServer(server, loop), lambda: loop.call_soon_threadsafe(stopping.set)))
            await stopping.wait()

    def run() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:
            if opened.done():
                raise
            opened.set_exception(error)

    thread = threading.Thread(target=run, name="blocking-server", daemon=True)
    thread.start()
    server, stop = opened.result()
    try:
        yield server
    finally:
        server.close()
        stop()
        thread.join()
