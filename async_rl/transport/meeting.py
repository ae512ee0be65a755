"""The store where the ends of the wire find each other, kept by rank 0 of the learner for its whole life.

What is too large for a message lies here: the layout, and what each rank packed of each version.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

from pydantic import TypeAdapter
from torch._C._distributed_c10d import TCPStore  # where torch's own type stubs have it

from async_rl.errors import WireError
from async_rl.transport.plan import Box, Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """One rank's parcel of one version."""

    chunks: tuple[str, ...]
    """The digest of each."""
    address: str
    """Where processes of the same machine find its memory; empty when nowhere."""


_PACKED = TypeAdapter(Packed)
_HELD = TypeAdapter(list[Box])


class Meeting:
    def __init__(self, host: str, port: int, server: TCPStore | None, wait_s: float) -> None:
        self.host = host
        self.port = port
        self._server = server
        self._wait_s = wait_s
        with as_wire_error(f"cannot reach the learner's store at {host}:{port}"):
            self.store = TCPStore(host, port, wait_for_workers=False, timeout=timedelta(seconds=wait_s))

    @classmethod
    def open(cls, host: str, wait_s: float) -> Meeting:
        try:
            family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
            listening = socket.create_server((host, 0), family=family)  # bound to `host` alone, not to every interface
        except OSError as error:
            raise WireError(
                f"wire.host: cannot listen at {host!r} ({error}); give an address of the learner's machine"
            ) from error
        port: int = listening.getsockname()[1]
        server = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())
        return cls(host, port, server, wait_s)

    @classmethod
    def join(cls, host: str, port: int, wait_s: float) -> Meeting:
        """Half the time is for the way there: so that whoever waits for an answer hears why there will be none."""
        with as_wire_error(f"cannot reach the learner's store at {host}:{port}"):
            socket.create_connection((host, port), timeout=wait_s / 2).close()  # torch would try on and fill the log
        return cls(host, port, None, wait_s)

    def again(self) -> Meeting:
        """Another way to the same store, for somebody who waits there: one connection serves one thread at a time."""
        return Meeting(self.host, self.port, None, self._wait_s)

    def close(self) -> None:
        self._server = None

    def post_held(self, rank: int, held: Sequence[Box]) -> None:
        self.store.set(f"held/{rank}", _HELD.dump_json(list(held)).decode())

    def held(self, rank: int) -> list[Box]:
        return _HELD.validate_json(self._read(f"held/{rank}"))

    def post_layout(self, layout: Layout) -> None:
        self.store.set("layout", layout.to_json().decode())

    def layout(self) -> Layout:
        return Layout.from_json(self._read("layout"))

    def post_packed(self, version: int, parcel: int, packed: Packed) -> None:
        self.store.set(_key(version, parcel), _PACKED.dump_json(packed).decode())

    def packed(self, version: int, parcels: int) -> tuple[Packed, ...]:
        return tuple(_PACKED.validate_json(self._read(_key(version, parcel))) for parcel in range(parcels))

    def forget(self, versions: Sequence[int], parcels: int) -> None:
        for version in versions:
            for parcel in range(parcels):
                self.store.delete_key(_key(version, parcel))

    def _read(self, key: str) -> bytes:
        with as_wire_error(f"the learner's store at {self.host}:{self.port} does not answer"):
            return self.store.get(key)


def _key(version: int, parcel: int) -> str:
    return f"packed/{version}/{parcel}"


@contextmanager
def as_wire_error(doing: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, OSError) as error:
        raise WireError(f"{doing}: {str(error).partition(chr(10))[0]}") from error
