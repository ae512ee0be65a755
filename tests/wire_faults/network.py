"""A worker on another machine, as the kernel sees it: a network of its own, whose cable can be cut in one direction.

A cut is silent, as by a firewall: packets go to an unused Ethernet address.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Direction = Literal["from_learner", "to_learner"]

LEARNER = "10.77.0.1"
_UNUSED = "02:00:00:00:00:99"
_CLONE_NEWNET = 0x40000000


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cable:
    pid: int
    number: int

    @property
    def here(self) -> str:
        return f"near{self.number}"

    @property
    def there(self) -> str:
        return f"far{self.number}"

    @property
    def address(self) -> str:
        return f"10.77.{self.number}.2"

    @property
    def inside(self) -> list[str]:
        return ["nsenter", "-t", str(self.pid), "-n"]


class Network:
    """For a process that was started by `in_network_of_its_own`; elsewhere `is_possible` is False."""

    def __init__(self) -> None:
        self.is_possible = os.environ.get("WIRE_FAULTS_NETWORK") == "own"
        self._cables: dict[str, _Cable] = {}
        self._count = 0
        if self.is_possible:
            _run("ip", "link", "set", "lo", "up")
            _run("ip", "addr", "add", f"{LEARNER}/32", "dev", "lo")

    def leave(self) -> None:
        """This process' own network from now on: it has no cable yet."""
        if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "unshare")

    def connect(self, name: str, pid: int) -> None:
        self._count += 1
        cable = self._cables[name] = _Cable(pid=pid, number=self._count)
        _run("ip", "link", "add", cable.here, "type", "veth", "peer", "name", cable.there)
        _run("ip", "link", "set", cable.there, "netns", str(pid))
        _run("ip", "link", "set", cable.here, "up")
        _run("ip", "route", "add", f"{cable.address}/32", "dev", cable.here, "src", LEARNER)
        _run(*cable.inside, "ip", "link", "set", "lo", "up")
        _run(*cable.inside, "ip", "addr", "add", f"{cable.address}/32", "dev", cable.there)
        _run(*cable.inside, "ip", "link", "set", cable.there, "up")
        _run(*cable.inside, "ip", "route", "add", f"{LEARNER}/32", "dev", cable.there, "src", cable.address)

    def cut(self, name: str, direction: Direction) -> None:
        self._neighbour(name, direction, "replace", "lladdr", _UNUSED, "nud", "permanent")

    def heal(self, name: str, direction: Direction) -> None:
        if name not in self._cables:
            return
        try:
            self._neighbour(name, direction, "del")
        except RuntimeError:
            if Path(f"/proc/{self._cables[name].pid}/ns/net").exists():
                raise  # else the trial has ended the process meanwhile, and its network with it

    def forget(self, name: str) -> None:
        self._cables.pop(name, None)  # the kernel takes the cable away with the network at its far end

    def _neighbour(self, name: str, direction: Direction, verb: str, *how: str) -> None:
        cable = self._cables[name]
        if direction == "from_learner":
            _run("ip", "neigh", verb, cable.address, "dev", cable.here, *how)
        else:
            _run(*cable.inside, "ip", "neigh", verb, LEARNER, "dev", cable.there, *how)


def in_network_of_its_own(command: list[str]) -> tuple[list[str], dict[str, str]]:
    """The command, and what its environment needs; unchanged where the system does not permit it."""
    enter = ["unshare", "--user", "--map-root-user", "--net"]
    if all(shutil.which(tool) for tool in ("unshare", "nsenter", "ip")):
        tried = subprocess.run([*enter, "ip", "link", "add", "try0", "type", "veth"], capture_output=True, check=False)
        if tried.returncode == 0:
            return [*enter, *command], {"WIRE_FAULTS_NETWORK": "own"}
    return command, {}


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
