"""How the ends of the wire find each other: a store in the run's Redis, and the address at which each end listens."""

from __future__ import annotations

import socket
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from async_rl.config.exposure import is_loopback
from async_rl.errors import BufferUnreachable, ConfigError, WireError

WIRE_STORE = "wire"
"""Name of the wire's store among the run's stores (`GroupStores.open`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WireRendezvous:
    store: Store
    """Holds the addresses of process groups. It is in the run's Redis, protected by its users and passwords."""
    address: str
    """Where this end listens while a process group is built; a learner rank also serves parcels over HTTP there."""

    @classmethod
    def listening_at(cls, host: str, store: Store) -> WireRendezvous:
        """For rank 0, which listens at its own `wire.host`. Raises WireError when it cannot."""
        try:
            family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
            with socket.create_server((host, 0), family=family) as probe:
                address = probe.getsockname()[0]
        except OSError as error:
            raise WireError(
                f"wire.host: cannot listen at {host!r} ({error}); give an address of the learner's machine"
            ) from error
        if is_loopback(address) and not is_loopback(host):  # as Debian's /etc/hosts says of a machine's own name
            raise WireError(
                f"wire.host: {host!r} is {address} on this machine, which no other machine reaches; give its address on the "
                "network that it shares with workers"
            )
        return cls(store=store, address=address)

    @classmethod
    def facing(cls, host: str, store: Store) -> WireRendezvous:
        """For every other process, which listens at the interface that leads to the learner's `wire.host`.

        The machine's own host name would not do: it may resolve to another interface, or not at all.
        """
        with as_wire_error(f"wire.host: {host!r} is no address that this machine reaches"):
            family, kind, protocol, _, address = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)  # sends nothing
                return cls(store=store, address=probe.getsockname()[0])


_ANY_PORT = 9


@contextmanager
def as_wire_error(doing: str) -> Generator[None]:
    """Raise torch's, Redis' and the system's errors inside the context as WireError."""
    try:
        yield
    except (RuntimeError, OSError, BufferUnreachable, ConfigError) as error:  # the last two come from a store on Redis
        raise WireError(f"{doing}: {str(error).partition(chr(10))[0]}") from error
