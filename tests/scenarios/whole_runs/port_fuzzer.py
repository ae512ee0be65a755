"""Frames of a stranger against every listener that is found: random bytes, beginnings of protocols, silence, and port scans."""

from __future__ import annotations

import contextlib
import random
import socket
from collections import deque
from collections.abc import Callable, Iterable

from tests.scenarios.whole_runs.listeners import Listener

HELD_MOST = 24
"""Connections that are left half-open at the same time."""
CONNECT_S = 2.0
_BEGINNINGS = (
    b"",
    b"GET /metrics HTTP/1.1\r\n",
    b"POST /score HTTP/1.1\r\nContent-Length: 4294967296\r\n\r\n",
    b"GET /play HTTP/1.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n\r\n",
    b"*3\r\n$4\r\nEVAL\r\n$-7\r\n",
    b"\x80\x04\x95\xff\xff\xff\xff\x00\x00\x00\x00c",
    b"\x16\x03\x01\x02\x00\x01\x00\x01",
)


class PortFuzzer:
    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self._held: deque[socket.socket] = deque()
        self.refused = 0
        """Frames that found nobody listening."""

    def send(self, listeners: Iterable[Listener], frames: int, *, is_alive: Callable[[], bool]) -> None:
        """So many frames at each of them; stops when the run does not live any more."""
        targets = sorted(listeners)
        for number in range(frames):
            if number % 50 == 0 and not is_alive():
                return
            for target in targets:
                self._one(target)

    def close(self) -> None:
        while self._held:
            self._held.popleft().close()

    def _one(self, target: Listener) -> None:
        try:
            connection = _connected(target)
        except OSError:
            self.refused += 1
            return
        with contextlib.suppress(OSError):  # hung up on
            self._say(connection)
        if self._chance.random() < 0.1:
            self._held.append(connection)
            if len(self._held) > HELD_MOST:
                self._held.popleft().close()
        else:
            connection.close()

    def _say(self, connection: socket.socket) -> None:
        match self._chance.randrange(4):
            case 0:  # a port scan
                return
            case 1:  # silence, then the end of one direction
                connection.shutdown(socket.SHUT_WR)
            case 2:
                connection.sendall(self._chance.randbytes(self._chance.choice([1, 8, 64, 1024, 65536])))
            case _:
                connection.sendall(self._chance.choice(_BEGINNINGS) + self._chance.randbytes(self._chance.randrange(64)))


def _connected(target: Listener) -> socket.socket:
    if target.kind == "unix":
        connection = socket.socket(socket.AF_UNIX)
        address: str | tuple[str, int] = f"\0{target.address[1:]}" if target.address.startswith("@") else target.address
    else:
        connection = socket.socket(socket.AF_INET6 if ":" in target.address else socket.AF_INET)
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(target.address, target.address)
        address = (host, target.port)
    connection.settimeout(CONNECT_S)
    try:
        connection.connect(address)
    except OSError:
        connection.close()
        raise
    return connection
