"""The address of this machine on the network over which it reaches the run's Redis, which all processes of a run share."""

from __future__ import annotations

import fcntl
import socket
import struct
from contextlib import suppress

from async_rl.config import Config
from async_rl.errors import ConfigError

LOOPBACK = "127.0.0.1"


def redis_hosts(config: Config) -> list[str]:
    """The hosts that `redis.url` names; none for a socket."""
    scheme, _, rest = config.redis_url.partition("://")
    if scheme == "unix":
        return []
    places = rest.partition("/")[0].partition("?")[0].rpartition("@")[2].split(",")
    return [_host(place) for place in places]


def _host(place: str) -> str:
    """Return the host of HOST, HOST:PORT, [IPV6] or [IPV6]:PORT."""
    if place.startswith("["):
        return place[1:].partition("]")[0]
    return place.partition(":")[0]


def own_address(config: Config) -> str:
    """Return this machine's address on the way to Redis; the loopback address if Redis is here. Raises ConfigError."""
    hosts = redis_hosts(config)
    if not hosts:
        return LOOPBACK
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(hosts[0], 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(place)  # a datagram socket sends nothing: it only chooses the interface
            return probe.getsockname()[0]
    except OSError as error:
        raise ConfigError(f"redis.url: this machine finds no way to {hosts[0]!r} ({error.strerror})") from error


_SIOCGIFADDR = 0x8915
"""Linux: ask for the IPv4 address of an interface."""


def interface_of(address: str) -> str | None:
    """The network interface that has this address; None if it cannot be told."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no IPv4 address
                answer = fcntl.ioctl(asker, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None
