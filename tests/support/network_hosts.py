"""Hosts on this machine: namespaces with addresses, names and process ids of their own, on one bridge. Needs root.

Each host's own name resolves to a loopback address, as Debian sets it up. Links have a rate (tbf) and can be cut (link down).
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

_PROGRAMS = ("ip", "tc", "unshare", "mount")
_NETWORK = "10.213.77"
_RATE = ("rate", "200mbit", "burst", "256kb", "latency", "400ms")
_ENTER = 'hostname "$1" && mount -t tmpfs none /dev/shm && cd "$2" && shift 2 && exec "$@"'


def missing() -> str:
    """Why there can be no hosts here; "" if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    lacks = [program for program in _PROGRAMS if shutil.which(program) is None]
    if lacks:
        return f"not installed: {', '.join(lacks)} (Debian: apt-get install iproute2)"
    tried = f"arl{os.getpid() % 10_000}t"
    if subprocess.run(["ip", "netns", "add", tried], capture_output=True).returncode:
        return "this system makes no network namespaces"
    subprocess.run(["ip", "netns", "delete", tried], check=True)
    return ""


@dataclass(frozen=True, kw_only=True)
class Host:
    name: str
    address: str
    namespace: str
    link: str
    """The bridge's end of its cable."""

    def command(self, folder: Path, command: Sequence[object]) -> list[str]:
        """How a command is run on this host, in a folder. Its processes end with the one that is started."""
        namespaces = ["unshare", "--uts", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc"]
        enter = ["ip", "netns", "exec", self.namespace, *namespaces, "sh", "-c", _ENTER, "sh", self.name, str(folder)]
        return [*enter, *map(str, command)]

    def cut(self) -> None:
        """Take the cable out: packets are lost, and nothing is told."""
        _run("ip", "link", "set", self.link, "down")

    def join(self) -> None:
        _run("ip", "link", "set", self.link, "up")


@contextmanager
def hosts(*names: str) -> Iterator[Mapping[str, Host]]:
    """Hosts that know each other by these names; at the end they are gone."""
    mark = f"arl{os.getpid() % 10_000}"
    found = {
        name: Host(name=name, address=f"{_NETWORK}.{number}", namespace=f"{mark}-{name}", link=f"{mark}l{number}")
        for number, name in enumerate(names, start=1)
    }
    with ExitStack() as stack:
        _run("ip", "link", "add", mark, "type", "bridge")
        stack.callback(_run, "ip", "link", "delete", mark)
        _run("ip", "link", "set", mark, "up")
        for host in found.values():
            stack.enter_context(_connected(host, mark, found.values()))
        yield found


@contextmanager
def _connected(host: Host, bridge: str, everyone: Iterable[Host]) -> Iterator[None]:
    _run("ip", "netns", "add", host.namespace)
    own = Path("/etc/netns") / host.namespace  # `ip netns exec` mounts its files over those of /etc
    try:
        own.mkdir(parents=True)
        others = "".join(f"{other.address} {other.name}\n" for other in everyone if other is not host)
        (own / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {host.name}\n{others}")
        inside = ("ip", "-netns", host.namespace)
        _run("ip", "link", "add", host.link, "type", "veth", "peer", "name", "eth0", "netns", host.namespace)
        _run("ip", "link", "set", host.link, "master", bridge, "up")
        _run("tc", "qdisc", "add", "dev", host.link, "root", "tbf", *_RATE)
        _run(*inside, "address", "add", f"{host.address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _run(*inside, "link", "set", device, "up")
        yield
    finally:
        shutil.rmtree(own, ignore_errors=True)
        subprocess.run(
            ["ip", "link", "delete", host.link], capture_output=True
        )  # the system deletes it with the namespace, but later
        _run("ip", "netns", "delete", host.namespace)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
