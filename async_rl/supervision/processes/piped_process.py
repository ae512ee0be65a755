"""A child process that is spoken to over pipes, and that can be ended at any time with all it started.

Frames: four bytes of length, then msgpack. Nothing is unpickled, on neither side.
"""

from __future__ import annotations

import asyncio
import os
import struct
import sys
from typing import Any, BinaryIO, ClassVar

import msgpack  # pyright: ignore[reportMissingTypeStubs]

from async_rl.supervision.processes.children import how_it_ended
from async_rl.supervision.processes.orphans import adopt_orphans, die_with_parent
from async_rl.supervision.processes.process_tree import kill_tree

LARGEST = 64 << 20
_LENGTH = struct.Struct(">I")


class ProcessEnded(Exception):
    """It is gone, or says what nobody can read."""


class PipedProcess:
    """The parent's end. Whoever starts one awaits `kill` in the end."""

    running: ClassVar[set[int]] = set()
    """Of this process: whoever looks for children that nobody cares for leaves these alone."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.running.add(process.pid)

    @classmethod
    async def start(cls, module: str, *arguments: str) -> PipedProcess:
        """`python -m module arguments`, which answers through `ChildPipe`. Its output goes to stderr."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", module, *arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # a Ctrl-C on the terminal reaches its parent alone
        )
        return cls(process)

    async def send(self, message: object) -> None:
        """Raises TypeError for what is no plain value."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(encode(message))
            await self._process.stdin.drain()
        except ConnectionError:
            raise await self._ended() from None

    async def receive(self) -> Any:
        assert self._process.stdout is not None
        try:
            (length,) = _LENGTH.unpack(await self._process.stdout.readexactly(_LENGTH.size))
            if length > LARGEST:
                raise ProcessEnded(f"announces a message of {length} bytes")
            return _decode(await self._process.stdout.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            raise await self._ended() from None

    async def kill(self) -> None:
        """It and all it started. Safe to repeat."""
        if self._process.returncode is None:
            kill_tree(self._process.pid)
        await self._process.wait()
        self.running.discard(self._process.pid)

    async def _ended(self) -> ProcessEnded:
        return ProcessEnded(how_it_ended(await self._process.wait()))


class ChildPipe:
    """The child's end: takes the place of its stdin and stdout, so that nothing else gets between the frames."""

    def __init__(self) -> None:
        die_with_parent()
        adopt_orphans()
        self._requests = _moved(0, os.open(os.devnull, os.O_RDONLY), "rb")
        self._answers = _moved(1, os.dup(2), "wb")

    def receive(self) -> Any:
        """Raises EOFError once the parent is gone."""
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
    if len(body) > LARGEST:
        raise TypeError(f"a message of {len(body)} bytes is too large to travel between processes")
    return _LENGTH.pack(len(body)) + body


def _decode(body: bytes) -> Any:
    return msgpack.unpackb(body)  # pyright: ignore


def _moved(number: int, replacement: int, mode: str) -> BinaryIO:
    """The file under `number`, out of reach of code that uses that number; `replacement` stands there from now on."""
    moved = os.dup(number)
    os.dup2(replacement, number)
    os.close(replacement)
    return os.fdopen(moved, mode)  # pyright: ignore[reportReturnType]
