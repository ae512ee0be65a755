"""Addresses and ports: the way to Redis, and where the processes of a run would listen."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass

from async_rl.config import Config
from async_rl.config.exposure import is_loopback
from async_rl.doctor.verdict import Verdict, bad, look, ok
from async_rl.errors import ConfigError
from async_rl.launch.own_address import interface_of, own_address


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenAttempt:
    setting: str
    host: str
    port: int
    """0: one that the system chooses."""
    problem: int = 0
    """The errno of an attempt to listen there; 0: it succeeded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkFacts:
    address: str = ""
    """This machine's, on the way to Redis."""
    interface: str = ""
    problem: str = ""
    """Why there is no way."""
    wire_host: str
    listeners: tuple[ListenAttempt, ...] = ()
    is_live: bool = False
    """Whether processes of the run already listen."""


def gather_network(config: Config, *, only_worker: bool, is_live: bool) -> NetworkFacts:
    """`only_worker`: this machine runs no learner, as with `worker --join`."""
    gateway, metrics = config.worker.gateway, config.metrics
    asked = [("worker.gateway", gateway.host, gateway.port)]
    if not only_worker:
        asked.append(("wire.host", config.wire.host, 0))
        if metrics.prometheus_port:
            asked.append(("metrics.prometheus_port", metrics.prometheus_host, metrics.prometheus_port))
    address, problem = "", ""
    try:
        address = own_address(config)
    except ConfigError as error:
        problem = str(error)
    return NetworkFacts(
        address=address,
        interface=(interface_of(address) or "") if address else "",
        problem=problem,
        wire_host="" if only_worker else config.wire.host,
        listeners=tuple(
            ListenAttempt(setting=setting, host=host, port=port, problem=_try_to_listen(host, port))
            for setting, host, port in asked
        ),
        is_live=is_live,
    )


def judge_network(facts: NetworkFacts) -> Iterator[Verdict]:
    if facts.problem:
        yield bad("way to Redis", facts.problem, "look at redis.url, DNS and routes")
    elif facts.wire_host and is_loopback(facts.wire_host) and not is_loopback(facts.address):
        yield look(
            "way to Redis",
            f"from {_own(facts)}, but wire.host is {facts.wire_host}, where workers on other machines get no weights",
            f"if the learner runs here and that network is private: wire.host: {facts.address} and wire.insecure: true",
        )
    else:
        yield ok("way to Redis", f"from {_own(facts)}")
    for listener in facts.listeners:
        yield _judge_listener(listener, is_live=facts.is_live)


def _judge_listener(listener: ListenAttempt, *, is_live: bool) -> Verdict:
    check, place = f"port of {listener.setting}", f"{listener.host}:{listener.port}"
    match listener.problem:
        case 0:
            return ok(check, f"{place} is free" if listener.port else f"any at {listener.host}")
        case errno.EADDRINUSE if is_live:
            return ok(check, f"{place} is in use, and the run lives")
        case errno.EADDRINUSE:
            return bad(check, f"{place} is in use by another program", "end that program, or choose another port")
        case errno.EADDRNOTAVAIL if listener.setting == "wire.host":
            return look(
                check, f"{listener.host} is no address of this machine", "rank 0 of the learner must run where it is one"
            )
        case code:
            return bad(
                check,
                f"nothing can listen at {place} ({_meaning(code)})",
                f"choose an address of this machine for {listener.setting}",
            )


def _own(facts: NetworkFacts) -> str:
    return f"{facts.address} ({facts.interface})" if facts.interface else facts.address


_NO_NAME = -1


def _try_to_listen(host: str, port: int) -> int:
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do, after one that has just ended
            listener.bind(place)
            listener.listen()
    except socket.gaierror:
        return _NO_NAME
    except OSError as error:
        return error.errno or errno.EIO
    return 0


def _meaning(code: int) -> str:

    return "its name leads to no address" if code == _NO_NAME else os.strerror(code)
