"""The store where the ends of the wire find each other, kept by rank 0 of the learner for its whole life.

What is too large for a message lies here: the layout, and what each rank packed of each version.
"""

from __future__ import annotations

import socket
import zlib
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

    def own_address(self) -> str:
        """Of the interface that leads to the store: a machine's host name may mean another, or nothing."""
        family, kind, protocol, _, address = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # sends nothing
            return probe.getsockname()[0]

    def post_held(self, rank: int, held: Sequence[Box]) -> None:
        self._post_long(f"held/{rank}", _HELD.dump_json(list(held)))

    def held(self, rank: int) -> list[Box]:
        return _HELD.validate_json(zlib.decompress(self._read(f"held/{rank}")))

    def post_layout(self, layout: Layout) -> None:
        self._post_long("layout", layout.to_json())

    def layout(self) -> Layout:
        return Layout.from_json(zlib.decompress(self._read("layout")))

    def post_packed(self, version: int, parcel: int, packed: Packed) -> None:
        self.store.set(_key(version, parcel), _PACKED.dump_json(packed).decode())

    def packed(self, version: int, parcels: int) -> tuple[Packed, ...]:
        return tuple(_PACKED.validate_json(self._read(_key(version, parcel))) for parcel in range(parcels))

    def has(self, version: int) -> bool:
        """Whether it was packed in this learner's life. Does not wait for it."""
        with as_wire_error(f"the learner's store at {self.host}:{self.port} does not answer"):
            return self.store.check([_key(version, 0)])

    def post_url(self, parcel: int, url: str) -> None:
        """Where the parcel's versions can be pulled from."""
        self.store.set(f"url/{parcel}", url)

    def urls(self, parcels: int) -> tuple[str, ...]:
        return tuple(self._read(f"url/{parcel}").decode() for parcel in range(parcels))

    def forget_packed(self, version: int, parcel: int) -> None:
        self.store.delete_key(_key(version, parcel))

    def _post_long(self, key: str, text: bytes) -> None:
        """The store takes 8 MiB, which a model of many experts exceeds; the names in a list repeat themselves."""
        self.store.set(key, zlib.compress(text, level=1))  # pyright: ignore[reportArgumentType]  # annotated str, takes both

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
