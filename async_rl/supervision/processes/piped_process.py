"""A child process with messages over pipes, which can be killed with all its descendants at any time.

Frames: four bytes of length, then msgpack. Neither side unpickles anything.
"""

from __future__ import annotations

import asyncio
import os
import struct
import sys
from typing import Any, BinaryIO, ClassVar

import msgpack  # pyright: ignore[reportMissingTypeStubs]

from async_rl.supervision.processes.orphans import adopt_orphans, die_with_parent
from async_rl.supervision.processes.process_tree import kill_tree
from async_rl.supervision.processes.restarting import how_it_ended

MAX_MESSAGE_BYTES = 64 << 20
_LENGTH = struct.Struct(">I")


class ProcessEnded(Exception):
    """The process ended, or sent an invalid message."""


class PipedProcess:
    """The parent's end. Its owner must await `kill`."""

    running: ClassVar[set[int]] = set()
    """Ids of the running ones of this process; a search for leaked processes must skip them."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.running.add(process.pid)

    @classmethod
    async def start(cls, module: str, *arguments: str) -> PipedProcess:
        """Start `python -m module arguments`, which must use `ChildPipe`. Its output goes to stderr."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", module, *arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C on the terminal reaches only the parent
        )
        return cls(process)

    async def send(self, message: object) -> None:
        """Send plain values (numbers, text, lists, dicts). Raises TypeError for others, ProcessEnded if it is gone."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(encode(message))
            await self._process.stdin.drain()
        except ConnectionError:
            raise await self._ended() from None

    async def receive(self) -> Any:
        """Block until there is a message. Raises ProcessEnded."""
        assert self._process.stdout is not None
        try:
            (length,) = _LENGTH.unpack(await self._process.stdout.readexactly(_LENGTH.size))
            if length > MAX_MESSAGE_BYTES:
                raise ProcessEnded(f"announced a message of {length} bytes")
            return _decode(await self._process.stdout.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            raise await self._ended() from None

    async def kill(self) -> None:
        """Kill the process and all its descendants. Safe to repeat."""
        if self._process.returncode is None:
            kill_tree(self._process.pid)
        await self._process.wait()
        self.running.discard(self._process.pid)

    async def _ended(self) -> ProcessEnded:
        return ProcessEnded(how_it_ended(await self._process.wait()))


class ChildPipe:
    """The child's end. Takes over stdin and stdout, so that other output cannot corrupt the frames."""

    def __init__(self) -> None:
        die_with_parent()
        adopt_orphans()
        self._requests = _moved(0, os.open(os.devnull, os.O_RDONLY), "rb")
        self._answers = _moved(1, os.dup(2), "wb")

    def receive(self) -> Any:
        """Block until there is a message. Raises EOFError if the parent is gone."""
        head = self._requests.read(_LENGTH.size)
        if len(head) < _LENGTH.size:
            raise EOFError
        return _decode(self._requests.read(_LENGTH.unpack(head)[0]))

    def send(self, message: object) -> None:
        self._answers.write(encode(message))
        self._answers.flush()


def encode(message: object) -> bytes:
    try:
        body: bytes = msgpack.packb(message)  # pyright: ignore
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(f"only plain values travel between processes (numbers, text, lists, dicts): {error}") from error
    if len(body) > MAX_MESSAGE_BYTES:
        raise TypeError(f"a message of {len(body)} bytes is too large to travel between processes")
    return _LENGTH.pack(len(body)) + body


def _decode(body: bytes) -> Any:
    return msgpack.unpackb(body)  # pyright: ignore


def _moved(number: int, replacement: int, mode: str) -> BinaryIO:
    """Move the file at descriptor `number` to a new one, and put `replacement` in its place."""
    moved = os.dup(number)
    os.dup2(replacement, number)
    os.close(replacement)
    return os.fdopen(moved, mode)  # pyright: ignore[reportReturnType]
