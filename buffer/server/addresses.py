"""Pure: parses `redis.url`.

redis://HOST:PORT/DB                    rediss://HOST:PORT/DB   one server; a second s anywhere is TLS
unix:///path/of/redis.sock                                      one server on this machine
redis+sentinel://HOST:PORT,HOST:PORT/NAME                       the master that these Sentinels call NAME
redis+cluster://HOST:PORT,HOST:PORT                             the node of a Cluster that owns the run
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple
from urllib.parse import parse_qsl, unquote

from async_rl.config.exposure import is_loopback
from async_rl.errors import ConfigError

Kind = Literal["socket", "server", "sentinel", "cluster"]

_SCHEMES: dict[str, tuple[Kind, bool]] = {
    "unix": ("socket", False),
    "redis": ("server", False),
    "rediss": ("server", True),
    "redis+sentinel": ("sentinel", False),
    "rediss+sentinel": ("sentinel", True),
    "redis+cluster": ("cluster", False),
    "rediss+cluster": ("cluster", True),
}
_PORTS: dict[Kind, int] = {"socket": 0, "server": 6379, "sentinel": 26379, "cluster": 6379}


class Node(NamedTuple):
    host: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    kind: Kind
    shown: str
    """The URL without credentials."""
    tls: bool = False
    nodes: tuple[Node, ...] = ()
    """A server, Sentinels, or some nodes of a Cluster."""
    path: str = ""
    """Path of the socket."""
    master: str = ""
    """Name of the master at the Sentinels."""
    db: int = 0
    user: str | None = None
    password: str | None = None
    """Credentials for `nodes`; the servers behind Sentinels have credentials of their own."""

    @property
    def remote_hosts(self) -> list[str]:
        return [node.host for node in self.nodes if not is_loopback(node.host)]


def parse_address(url: str) -> Address:
    """Raises ConfigError."""
    shown = _without_secrets(url)
    try:
        return _parse(url, shown)
    except ValueError as error:
        raise ConfigError(f"redis.url: {shown!r} is not an address of a Redis server: {error}") from error


def _parse(url: str, shown: str) -> Address:
    # Not urlsplit, which rejects a list of hosts.
    scheme, colon, rest = url.partition("://")
    if not colon or scheme not in _SCHEMES:
        raise ValueError(f"it must begin with one of {', '.join(f'{known}://' for known in _SCHEMES)}")
    kind, tls = _SCHEMES[scheme]
    rest, _, query = rest.partition("?")
    places, slash, path = rest.partition("/")
    credentials, _, places = places.rpartition("@")
    user, _, password = credentials.partition(":")
    options = _parse_options(query)
    return Address(
        kind=kind,
        shown=shown,
        tls=tls,
        nodes=() if kind == "socket" else tuple(_parse_node(place, _PORTS[kind]) for place in places.split(",")),
        path=_required(unquote(slash + path), "the path of the socket is missing") if kind == "socket" else "",
        master=_required(path.strip("/"), "the master's name is missing after the last /") if kind == "sentinel" else "",
        db=_parse_db(kind, path, options),
        user=unquote(user) if user else None,
        password=unquote(password) if password else options.get("password"),
    )


def _parse_options(query: str) -> dict[str, str]:
    options = dict(parse_qsl(query, keep_blank_values=True))
    if unknown := options.keys() - {"db", "password"}:
        raise ValueError(f"{min(unknown)!r} after the ? is not known; db and password are")
    return options


def _parse_db(kind: Kind, path: str, options: dict[str, str]) -> int:
    text = options.get("db", path.strip("/") if kind in ("server", "cluster") else "")
    if text and not text.isdigit():
        raise ValueError(f"{text!r} is not a database number")
    if kind == "cluster" and int(text if text else 0):
        raise ValueError("a Cluster has database 0 only")
    return int(text) if text else 0


def _parse_node(place: str, default_port: int) -> Node:
    """HOST, HOST:PORT, [IPV6] or [IPV6]:PORT."""
    host, port = (place, "") if place.endswith("]") or ":" not in place else place.rsplit(":", 1)
    if port and not port.isdigit():
        raise ValueError(f"{port!r} is not a port")
    return Node(_required(host.strip("[]"), "a host is missing"), int(port) if port else default_port)


def _required(text: str, complaint: str) -> str:
    if not text:
        raise ValueError(complaint)
    return text


def _without_secrets(url: str) -> str:
    scheme, colon, rest = url.partition("?")[0].partition("://")
    place, slash, path = rest.partition("/")
    return f"{scheme}{colon}{place.rpartition('@')[2]}{slash}{path}"
