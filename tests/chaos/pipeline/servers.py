"""The Redis of a round: the run's own, or an outside one behind a proxy that can be emptied and have its clock set back."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from buffer.server.embedded.programs import find_binary, server_command
from tests.chaos.pipeline.clock import OFFSET, wrong_clock
from tests.support.chaos_proxy import ChaosProxy
from tests.support.private_server import client_of, wait_until_it_answers


class OutsideServer:
    def __init__(self, folder: Path) -> None:
        """`folder` needs a short path, because a socket's path has about 100 bytes."""
        self._folder = folder
        self._socket = folder / "redis.sock"
        self._clock = wrong_clock(folder)
        self._offset_s = 0
        self.start()

    @property
    def url(self) -> str:
        return f"unix://{self._socket}"

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_a_clock_of_its_own(self) -> bool:
        return self._clock is not None

    def start(self) -> None:
        environment = dict(os.environ)
        if self._clock is not None:
            environment |= {"LD_PRELOAD": str(self._clock), OFFSET: str(self._offset_s)}
        command = server_command(find_binary(), self._folder, self._socket, 256)
        self._process = subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL
        )
        with client_of(unix_socket_path=str(self._socket)) as client:
            assert wait_until_it_answers(client, self._process), "the server does not start"

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def empty(self) -> None:
        """Start it again after a kill."""
        shutil.rmtree(self._folder / "appendonlydir", ignore_errors=True)

    def set_clock_back(self, seconds: int) -> None:
        """Takes effect at the next start."""
        self._offset_s -= seconds


@contextmanager
def proxied(server: OutsideServer, *, seed: int) -> Iterator[NetworkBetween]:
    """The proxy runs on a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="proxy")
    thread.start()
    proxy = ChaosProxy(server.url, seed=seed)

    def on_loop(call: Callable[[], Any]) -> Any:
        async def answer() -> Any:
            result = call()
            return await result if asyncio.iscoroutine(result) else result

        return asyncio.run_coroutine_threadsafe(answer(), loop).result(30)

    on_loop(proxy.__aenter__)
    try:
        yield NetworkBetween(proxy, on_loop)
    finally:
        on_loop(lambda: proxy.__aexit__(None, None, None))
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


class NetworkBetween:
    def __init__(self, proxy: ChaosProxy, on_loop: Callable[[Callable[[], Any]], Any]) -> None:
        self._proxy, self._on_loop = proxy, on_loop
        self.url = proxy.url

    def reset(self) -> None:
        self._on_loop(self._proxy.reset_all)

    def cut(self) -> None:
        """Stop forwarding on the open connections without closing them."""
        self._on_loop(lambda: self._proxy.silence("to_server", "to_client"))

    def weather(self, *, delay_s: tuple[float, float] = (0.0, 0.0), tear: float = 0.0) -> None:
        def change() -> None:
            self._proxy.weather.delay_s, self._proxy.weather.tear = delay_s, tear

        self._on_loop(change)
