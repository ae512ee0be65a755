"""Where the ends of the wire find each other."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from async_rl.errors import BufferUnreachable, ConfigError, WireError

STORE = "wire"
"""The name of the wire's store among the run's (`GroupStores.open`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WireRendezvous:
    store: Store
    """For the addresses of process groups. It lies in the run's Redis, behind its users and passwords."""
    address: str
    """At which this end listens: while a process group forms, and a rank for workers that pull parcels."""

    @classmethod
    def at(cls, host: str, store: Store) -> WireRendezvous:
        """Rank 0's: `host` is its own `wire.host`."""
        try:
            family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
            with socket.create_server((host, 0), family=family) as probe:
                return cls(store=store, address=probe.getsockname()[0])
        except OSError as error:
            raise WireError(
                f"wire.host: cannot listen at {host!r} ({error}); give an address of the learner's machine"
            ) from error

    @classmethod
    def towards(cls, host: str, store: Store) -> WireRendezvous:
        """At the interface that leads to the learner's `wire.host`: a machine's host name may mean another, or nothing."""
        with as_wire_error(f"wire.host: {host!r} is no address that this machine reaches"):
            family, kind, protocol, _, address = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)  # sends nothing
                return cls(store=store, address=probe.getsockname()[0])


_ANY_PORT = 9


@contextmanager
def as_wire_error(doing: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, OSError, BufferUnreachable, ConfigError) as error:  # the last two: what a store on Redis says
        raise WireError(f"{doing}: {str(error).partition(chr(10))[0]}") from error
