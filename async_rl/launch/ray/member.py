"""An actor that runs one process of a fleet on the machine where Ray placed it."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from async_rl.config import Config
from async_rl.config.loading import load_file
from async_rl.durable.private_files import keep_files_private
from async_rl.launch.fleet_plan import MemberPlan
from async_rl.launch.member_spec import member_spec
from async_rl.launch.ray.cluster import this_machine
from async_rl.launch.ray.reach import wire_host
from async_rl.supervision import Child, FatalExit, RestartPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberPlace:
    machine: str
    """Ray's id of the machine."""
    host: str
    address: str
    """On the network of the cluster."""
    pid: int
    """Process id of the actor."""


class FleetMember:
    """Starts the process once, and ends with it. It is the actor's child: the kernel ends it if the actor dies."""

    def __init__(self, plan: MemberPlan, config_yaml: str, secrets: Mapping[str, str], defaults: Mapping[str, str]) -> None:
        """`config_yaml`: the run's configuration. `secrets`, `defaults`: environment variables that are not in it; those of
        this machine go before `defaults`."""
        keep_files_private()
        self._plan, self._config_yaml, self._secrets, self._defaults = plan, config_yaml, secrets, defaults
        self._child: Child | None = None
        self._is_asked_to_end = False

    def __repr__(self) -> str:
        """Ray puts this before every line that the process prints."""
        return self._plan.name

    async def place(self) -> MemberPlace:
        machine, address = this_machine()
        return MemberPlace(machine=machine, address=address, host=socket.gethostname(), pid=os.getpid())

    async def run(self) -> int:
        """Return the exit code of the process, negative for a signal."""
        with TemporaryDirectory(prefix="async-rl-") as folder:  # of mode 0700
            path = Path(folder) / "config.yaml"
            path.write_text(self._config_yaml)
            config = load_file(Config, path)
            spec = member_spec(
                self._plan,
                config,
                path,
                {**self._defaults, **os.environ, **self._secrets},
                address=wire_host(config, this_machine()[1]),
                policy=RestartPolicy(limit=0, silence_s=config.supervision.policy.silence_s),  # the fleet restarts it
                log=config.run_folder / "logs" / f"{self._plan.name}.log" if self._plan.has_log else None,
            )
            self._child = Child(spec, on_start=lambda _name, _pid: None)
            if self._is_asked_to_end:
                return 0
            try:
                return await self._child.supervise()
            except FatalExit as fatal:
                return fatal.status

    async def terminate(self) -> None:
        """Send SIGTERM to the process: it hands back what it holds, or writes a checkpoint, and ends."""
        self._is_asked_to_end = True
        if self._child is not None:
            self._child.terminate()
