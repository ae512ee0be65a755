"""A real Slurm cluster on this machine, in a folder: munge, slurmctld, and a slurmd for each node. Needs root.

Jobs of the partition `urgent` preempt those of `main`, and after two minutes those of `graced`.
A node is a slurmd with a host name and a process namespace of its own: killing its first process is a power failure.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.support.waiting import until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "unshare")
START_S = 60.0

_CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1,sched_min_interval=0
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
SlurmdTimeout=10
MinJobAge=10
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=main Nodes=ALL Default=YES PriorityTier=1 MaxTime=INFINITE State=UP
PartitionName=graced Nodes=ALL PriorityTier=1 GraceTime=120 MaxTime=INFINITE State=UP
PartitionName=urgent Nodes=ALL PriorityTier=2 MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """Why there can be no cluster here; "" if there can."""
    if os.geteuid() != 0:
        return "starting slurmd needs root"
    lacks = [program for program in PROGRAMS if shutil.which(program) is None]
    return f"Slurm is not installed: {', '.join(lacks)} (Debian: apt-get install slurm-wlm munge)" if lacks else ""


class SlurmCluster:
    def __init__(self, folder: Path, ports: Mapping[str, int]) -> None:
        self._folder, self._ports = folder, ports
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}
        self.environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}

    def ask(self, *command: str) -> str:
        """Run a command of Slurm and return what it prints."""
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
        return done.stdout

    def start_node(self, name: str) -> None:
        daemon = f"hostname {name}; slurmd -D -f {self._folder}/slurm.conf & wait $!"  # the shell, as process 1, reaps
        namespaces = ("unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc")
        with (self._folder / f"slurmd-{name}.log").open("ab") as log:
            self._nodes[name] = subprocess.Popen([*namespaces, "sh", "-c", daemon], stdout=log, stderr=log)

    def lose_node(self, name: str) -> None:
        """End all of its processes at once."""
        node = self._nodes.pop(name)
        node.kill()
        node.wait()

    def stop(self) -> None:
        for name in list(self._nodes):
            self.lose_node(name)

    def is_up(self) -> bool:
        states = subprocess.run(
            ["sinfo", "--noheader", "--Node", "--partition=main", "--format=%T"],
            env=self.environment,
            capture_output=True,
            text=True,
        ).stdout.split()
        return len(states) == len(self._ports) and all(state == "idle" for state in states)


@contextmanager
def slurm_cluster(nodes: Sequence[str], cpus: int = 4) -> Iterator[SlurmCluster]:
    """A cluster of nodes with these names, ready for jobs; at the end it is gone with all its processes."""
    with tempfile.TemporaryDirectory(prefix="slurm") as made, ExitStack() as stack:
        folder = Path(made)
        folder.chmod(0o755)
        (folder / "state").mkdir()
        controller, *ports = _free_ports(1 + len(nodes))
        lines = [
            f"NodeName={name} NodeAddr=127.0.0.1 Port={port} CPUs={cpus}\n" for name, port in zip(nodes, ports, strict=True)
        ]
        conf = _CONF.format(host=socket.gethostname(), controller=controller, folder=folder)
        (folder / "slurm.conf").write_text(conf + "".join(lines))
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        files = {"socket": "munge.socket", "key-file": "munge.key", "pid-file": "munge.pid", "seed-file": "munge.seed"}
        daemon = ["munged", "--foreground", "--force", *(f"--{option}={folder / name}" for option, name in files.items())]
        stack.enter_context(_running([*daemon, f"--log-file={folder}/munge.log"], folder / "munged.log"))
        until((folder / "munge.socket").exists, "munge answers", within_s=START_S)
        stack.enter_context(_running(["slurmctld", "-D", "-f", f"{folder}/slurm.conf"], folder / "slurmctld.log"))
        cluster = SlurmCluster(folder, dict(zip(nodes, ports, strict=True)))
        stack.callback(cluster.stop)
        for name in nodes:
            cluster.start_node(name)
        until(cluster.is_up, "all nodes of the Slurm cluster are idle", within_s=START_S)
        yield cluster


@contextmanager
def _running(command: Sequence[str], log: Path) -> Iterator[None]:
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def _free_ports(count: int) -> list[int]:
    with ExitStack() as opened:
        sockets = [opened.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
