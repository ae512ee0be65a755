"""Serves packed parcels over HTTP, for workers that join between two pushes. No push waits for them.

    GET /SECRET/VERSION   Range: bytes=0-33554431   ──▶   206, straight from the rank's packed memory
                                                    ──▶   404, when the version was dropped for newer ones

A version is not overwritten while a part of it is being sent, and a part must be sent within one operation timeout: a slow
reader blocks the memory no longer than that, then starts over. The same happens to readers that are too many to be served in
that time; the next push serves any number of them at once.
"""

from __future__ import annotations

import re
import secrets
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from threading import Event
from typing import Any
from urllib.parse import urlsplit

import torch

from async_rl.errors import WireError
from async_rl.supervision import ServiceThread
from async_rl.transport.digest import chunks_of
from async_rl.transport.gpu_stream import on_host, transport_stream
from async_rl.transport.wire.rendezvous import as_wire_error

Reading = Callable[[int], AbstractContextManager[torch.Tensor]]
"""Opens a version's parcel for reading. Raises WireError when the version was dropped."""

_AT_ONCE = 8
"""Parts sent concurrently; more would only make each slower."""

_CONNECTIONS = 64
"""Open connections; further ones are closed at once. Each costs a thread and a descriptor before it is authenticated."""

_REQUEST_S = 2.0
"""Time limit for receiving a request; workers send theirs at once."""

_PROBE_S = 0.3
"""Time limit for connecting, which needs no process to be awake; shorter than the learner waits for a report of failure."""

_NO_DESCRIPTORS_S = 0.1
"""Pause before accepting again when file descriptors have run out."""

_RANGE = re.compile(r"bytes=(\d+)-(\d+)")


class ParcelServer(ThreadingHTTPServer):
    """Serves one rank's parcels on background threads until `close`."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: str, reading: Reading, timeout_s: float) -> None:
        """Listens at `address` only, at a port chosen by the system. Raises WireError when it cannot."""
        self.secret, self.reading, self.timeout_s = secrets.token_urlsafe(16), reading, timeout_s
        self.places = threading.Semaphore(_AT_ONCE)
        self.connections = threading.Semaphore(_CONNECTIONS)
        self._closing = Event()
        try:
            self.address_family = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][0]
            super().__init__((address, 0), _ParcelRequestHandler)
        except OSError as error:
            raise WireError(f"cannot serve weights at {address}: {error}") from error
        host = f"[{address}]" if ":" in address else address
        self.url = f"http://{host}:{self.server_port}/{self.secret}"
        """Contains the secret: knowing the URL is necessary and sufficient to read the weights."""
        self._thread = ServiceThread(lambda _: self._accept(), name="weight-serving").start()

    def close(self) -> None:
        self._closing.set()
        self._thread.stop()
        with suppress(OSError):  # without a free descriptor the thread is left to the end of the process
            socket.create_connection(self.socket.getsockname()[:2]).close()  # wakes the accepting thread
            self._thread.join()
        self.server_close()

    def _accept(self) -> None:
        while not self._closing.is_set():
            self.handle_request()

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError:
            self._closing.wait(_NO_DESCRIPTORS_S)
            raise

    def verify_request(self, request: object, client_address: object) -> bool:
        return self.connections.acquire(blocking=False)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.connections.release()

    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # HTTPServer would look up this machine's name, which may take long
        self.server_port = self.socket.getsockname()[1]

    def handle_error(self, request: object, client_address: object) -> None:
        if not isinstance(sys.exception(), OSError):  # a reader that went away, or was too slow
            super().handle_error(request, client_address)  # pyright: ignore[reportArgumentType]


class _ParcelRequestHandler(BaseHTTPRequestHandler):
    def setup(self) -> None:
        super().setup()
        self.connection.settimeout(min(_REQUEST_S, self._served_by.timeout_s))

    @property
    def _served_by(self) -> ParcelServer:
        assert isinstance(self.server, ParcelServer)
        return self.server

    def do_GET(self) -> None:
        secret, _, version = self.path.removeprefix("/").partition("/")
        if not secrets.compare_digest(secret.encode(), self._served_by.secret.encode()) or not version.isdecimal():
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        self.connection.settimeout(self._served_by.timeout_s)  # for the whole response
        with self._served_by.places:
            try:
                with self._served_by.reading(int(version)) as parcel:
                    self._send(parcel)
            except WireError as gone:
                self.send_error(HTTPStatus.NOT_FOUND, str(gone))

    def _send(self, parcel: torch.Tensor) -> None:
        asked = _RANGE.fullmatch(self.headers.get("Range", f"bytes=0-{len(parcel) - 1}"))
        start, stop = (int(asked[1]), min(int(asked[2]) + 1, len(parcel))) if asked else (0, 0)
        if start >= stop:
            self.send_error(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE)
            return
        self.send_response(HTTPStatus.PARTIAL_CONTENT)
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(stop - start))
        self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(parcel)}")
        self.end_headers()
        with transport_stream(parcel.device):
            for part in on_host(chunks_of(parcel[start:stop])):
                self.wfile.write(part.numpy().data)

    def log_message(self, format: str, *args: object) -> None:
        pass


def is_reachable(url: str) -> bool:
    """Whether packets reach the machine of a parcel's URL and come back; a refused connection is proof of that too."""
    where = urlsplit(url)
    try:
        socket.create_connection((where.hostname or "", where.port or 0), _PROBE_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return True


def pull(
    url: str,
    version: int,
    data: torch.Tensor,
    part_bytes: int,
    timeout_s: float,
    abandoned: Event,
    on_received: Callable[[int], None],
) -> None:
    """Pull a parcel into `data`, part by part. `on_received` is called with the bytes received so far.

    Raises WireError when the version is gone, when a part takes longer than `timeout_s`, or once `abandoned` is set.
    """
    where = urlsplit(url)
    for start in range(0, len(data), part_bytes):
        if abandoned.is_set():
            raise WireError("it was cancelled")
        part = data[start : start + part_bytes]
        with as_wire_error(f"cannot pull version {version} from {where.hostname}"):
            host = part if part.device.type == "cpu" else torch.empty_like(part, device="cpu")
            _get(where.hostname or "", where.port or 0, f"{where.path}/{version}", start, host, timeout_s)
            if host is not part:
                part.copy_(host)
        on_received(start + len(part))


def _get(host: str, port: int, path: str, start: int, part: torch.Tensor, timeout_s: float) -> None:
    connection = HTTPConnection(host, port, timeout=timeout_s)
    try:
        connection.request("GET", path, headers={"Range": f"bytes={start}-{start + len(part) - 1}"})
        with connection.getresponse() as answer:  # the response keeps the socket open even when the connection is closed
            if answer.status != HTTPStatus.PARTIAL_CONTENT:
                raise RuntimeError(answer.reason)
            view, filled = part.numpy().data, 0
            while filled < len(view):
                if not (count := answer.readinto(view[filled:])):
                    raise RuntimeError(f"the connection ended {len(view) - filled} bytes early")
                filled += count
    except HTTPException as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from error
    finally:
        connection.close()
