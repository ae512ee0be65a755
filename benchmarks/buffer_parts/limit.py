"""The upper limit of the server and a socket for the same bytes: no codec, no parser, no client, no bookkeeping.

Values are pushed onto a list many per send, and popped many per reply into one buffer, without being parsed. A round
trip is a push and a pop; one process does both, so the server has the other core to itself.
"""

from __future__ import annotations

import socket
import time
from urllib.parse import urlsplit

from rivals.rollouts import GROUP

from async_rl.payloads.codec import encode
from buffer_parts.groups import group
from buffer_parts.server import server

SENT_AT_ONCE = 1 << 20
"""Bytes per command; more do not help."""
SOCKET_BUFFER = 4 << 20


def limits_per_s(tokens: int, rollouts: int) -> tuple[float, float]:
    """Return rollouts per second, with one rollout per value and with eight, as in our groups."""
    single, grouped = encode(group(tokens, seed=0, size=1)), encode(group(tokens, seed=0))
    return _round_trips_per_s(single, rollouts), GROUP * _round_trips_per_s(grouped, rollouts // GROUP)


def _round_trips_per_s(value: bytes, count: int) -> float:
    at_once = max(1, min(count, SENT_AT_ONCE // len(value)))
    batches = count // at_once
    push = command(b"LPUSH", b"rollouts", *[value] * at_once)
    pop = command(b"RPOP", b"rollouts", b"%d" % at_once)
    popped = bytearray(len(command(*[value] * at_once)))
    with server() as where, connected(where) as connection:
        _push(connection, push, 1)
        _pop(connection, pop, popped, 1)  # warm up
        started = time.perf_counter()
        _push(connection, push, batches)
        _pop(connection, pop, popped, batches)
        seconds = time.perf_counter() - started
    return batches * at_once / seconds


def _push(connection: socket.socket, command: bytes, batches: int) -> None:
    reply = memoryview(bytearray(64))
    for _ in range(batches):
        connection.sendall(command)
        connection.recv_into(reply)


def _pop(connection: socket.socket, command: bytes, popped: bytearray, batches: int) -> None:
    for _ in range(batches):
        connection.sendall(command)
        _receive_into(connection, memoryview(popped))


def connected(where: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        connection.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER)
    connection.connect(urlsplit(where).path)
    return connection


def command(*words: bytes) -> bytes:
    """Encode a command in the Redis protocol; an array reply looks the same."""
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)


def receive(connection: socket.socket, expected: bytes) -> None:
    """Wait until exactly these bytes have arrived."""
    reply = bytearray(len(expected))
    _receive_into(connection, memoryview(reply))
    assert reply == expected, bytes(reply[:200])


def _receive_into(connection: socket.socket, missing: memoryview) -> None:
    while missing:
        missing = missing[connection.recv_into(missing) :]
