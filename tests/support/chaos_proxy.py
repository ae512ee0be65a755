"""A bad network between a client and a server: late, slow, torn, or silent without being closed. Its luck comes from a seed."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal, Self

Direction = Literal["to_server", "to_client"]
CHUNK = 1 << 16


@dataclass(slots=True, kw_only=True)
class Weather:
    """May change while bytes flow."""

    tear: float = 0.0
    """How likely a chunk is to end somewhere in its middle, and the connection with it."""
    delay_s: tuple[float, float] = (0.0, 0.0)
    """Every chunk is late by something in between."""
    drip: int = 0
    """Bytes that pass at a time; 0 lets all pass."""
    loses_reply: Callable[[bytes], bool] = lambda request: False
    """Whether the connection is cut between the server's answer to these bytes and us."""


@dataclass(eq=False, slots=True)
class _Line:
    """One connection through the proxy."""

    client: asyncio.StreamWriter
    server: asyncio.StreamWriter
    silent: set[Direction] = field(default_factory=set)
    doomed: bool = False

    def reset(self) -> None:
        """Both ends see "connection reset", not an orderly end."""
        for end in (self.client, self.server):
            end.transport.abort()


class ChaosProxy:
    """`async with ChaosProxy("unix:///path", seed=1) as proxy`: the same server answers at `proxy.url`, in worse weather."""

    def __init__(self, target: str, *, seed: int, listens: tuple[str, int] = ("127.0.0.1", 0)) -> None:
        """`target`: unix:///PATH, or HOST:PORT."""
        self._target, self._listens = target, listens
        self._random = random.Random(seed)
        self._lines: set[_Line] = set()
        self._pumps: set[asyncio.Task[None]] = set()
        self.weather = Weather()
        self.resets = 0

    async def __aenter__(self) -> Self:
        self._listener = await asyncio.start_server(self._serve, *self._listens)
        self.url = f"redis://{self._listens[0]}:{self._listener.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.close()
        pumps = list(self._pumps)
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)

    def reset_all(self) -> int:
        """Return how many connections there were."""
        for line in (lines := list(self._lines)):
            self._reset(line)
        return len(lines)

    def silence(self, *directions: Direction) -> None:
        """Nothing passes any more on the connections that are open now, and nobody is told. Later ones are sound."""
        for line in self._lines:
            line.silent.update(directions)

    async def _serve(self, from_client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        serving = asyncio.current_task()
        assert serving is not None
        self._pumps.add(serving)
        try:
            from_server, to_server = await self._connected()
        except OSError:  # the server is gone for the moment
            self._pumps.discard(serving)
            to_client.transport.abort()
            return
        line = _Line(to_client, to_server)
        self._lines.add(line)
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._pump(line, "to_server", from_client, to_server))
                both.create_task(self._pump(line, "to_client", from_server, to_client))
        except asyncio.CancelledError:  # only we cancel it, at the end; asyncio would report a cancelled server task as a bug
            pass
        finally:
            self._lines.discard(line)
            self._pumps.discard(serving)
            line.reset()

    async def _connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._target.startswith("unix://"):
            return await asyncio.open_unix_connection(self._target.removeprefix("unix://"))
        host, _, port = self._target.rpartition(":")
        return await asyncio.open_connection(host, int(port))

    async def _pump(self, line: _Line, way: Direction, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):  # one of the ends is gone: so is the line
            while chunk := await source.read(CHUNK):
                if way == "to_server" and self.weather.loses_reply(chunk):
                    line.doomed = True
                if way == "to_client" and line.doomed:
                    break
                await asyncio.sleep(self._random.uniform(*self.weather.delay_s))
                if way in line.silent:
                    continue
                if self._random.random() < self.weather.tear:
                    sink.write(chunk[: self._random.randrange(len(chunk) + 1)])
                    await sink.drain()
                    break
                await self._pass_on(chunk, sink)
        self._reset(line)

    async def _pass_on(self, chunk: bytes, sink: asyncio.StreamWriter) -> None:
        size = self.weather.drip if self.weather.drip else len(chunk)
        for start in range(0, len(chunk), size):
            sink.write(chunk[start : start + size])
            await sink.drain()
            await asyncio.sleep(0)

    def _reset(self, line: _Line) -> None:
        self.resets += 1
        line.reset()
