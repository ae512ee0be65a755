"""What a reader of a rank's HTTP server leaves behind."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import torch

from async_rl.errors import WireError
from async_rl.transport.wire.http import is_reachable, pull


def test_a_reader_that_is_refused_hangs_up() -> None:
    """Also while its error is alive, which refers to the answer."""
    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor(1) as threads:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/secret"
        data = torch.zeros(10, dtype=torch.uint8)
        pulled = threads.submit(pull, url, 1, data, len(data), 20.0, Event(), lambda _: None)
        connection, _ = listening.accept()
        with connection, connection.makefile("rb") as request:
            while request.readline().strip():
                pass
            connection.sendall(b"HTTP/1.0 404 Not Found\r\nContent-Length: 4\r\n\r\n")
            assert isinstance(pulled.exception(timeout=30), WireError)
            connection.settimeout(20)
            assert connection.recv(1) == b""


def test_a_machine_that_refuses_is_reachable_and_one_that_swallows_packets_is_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/secret"
        assert is_reachable(url)
    assert is_reachable(url), "nothing listens there any more"
    with socket.socket() as full:  # a full queue: the kernel drops further connections without an answer
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        waiting = [socket.socket() for _ in range(4)]
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(full.getsockname())
        assert not is_reachable(f"http://127.0.0.1:{full.getsockname()[1]}/secret")
        for each in waiting:
            each.close()
