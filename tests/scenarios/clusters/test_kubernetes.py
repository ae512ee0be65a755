"""The commands and probes of deploy/kubernetes/base as processes of this machine: they train, answer, drain."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.certificates import make_authority, make_certificate
from tests.support.page_commands import commands
from tests.support.private_server import binaries, private_server
from tests.support.repository import ROOT
from tests.support.run_processes import ASYNC_RL, finished
from tests.support.waiting import until

SERVER = next((path for path in binaries().values() if b"SSL_CTX_new" in path.read_bytes()), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(SERVER is None, reason="no server here was built with TLS (Debian's redis-server is)"),
]
MANIFESTS, RUN = ROOT / "deploy" / "kubernetes", "shapes"
PAGE = "docs/launch/kubernetes.md"
ASKED_TO_END = 75


def pod_of(name: str, kind: str) -> dict[str, Any]:
    found = yaml.safe_load_all((MANIFESTS / "base" / f"{name}.yaml").read_text())
    return next(each["spec"]["template"]["spec"] for each in found if each["kind"] == kind)


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


class Cluster:
    """A folder for each pod's volumes; names, addresses and ports are this machine's."""

    def __init__(self, folder: Path) -> None:
        assert SERVER is not None
        self.folder = folder
        self.ports = {"6379": free_port(), "9400": free_port(), "9500": free_port()}
        self._here = {
            "valkey-server": str(SERVER),
            "valkey-cli": f"{SERVER.parent}/redis-cli -p 6379",
            "valkey:6379": "localhost:6379",
            "$(POD_IP)": "127.0.0.1",
            "0.0.0.0": "127.0.0.1",
            "$(RUN)": RUN,
            **{f"{mount}/": f"{folder}{mount}/" for mount in ("/tls", "/users", "/etc/async-rl")},
        }

    def words(self, name: str, words: list[str]) -> list[str]:
        whole = {"/data": "data", "/runs": f"runs-{name}", "/secrets/password": f"{name}.password"}
        return [self._local(str(self.folder / whole[word]) if word in whole else word) for word in words]

    def _local(self, text: str) -> str:
        for word, here in {**self._here, **self.ports}.items():
            text = text.replace(word, here)
        return text

    @contextmanager
    def container(self, name: str, kind: str) -> Iterator[subprocess.Popen[bytes]]:
        found = pod_of(name, kind)["containers"][0]
        command = self.words(name, [*found["command"], *found["args"]])
        environment = os.environ | {"PATH": f"{Path(ASYNC_RL).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
        with (self.folder / f"{name}.out").open("ab") as output:
            process = subprocess.Popen(
                command, cwd=self.folder, env=environment, stdout=output, stderr=output, start_new_session=True
            )
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def answers(self, name: str, kind: str, probe: str) -> bool:
        """Whether a probe succeeds."""
        wanted: Mapping[str, Any] = pod_of(name, kind)["containers"][0][probe]
        if "exec" in wanted:
            command = self.words(name, wanted["exec"]["command"])
            environment = os.environ | {"REDISCLI_AUTH": (self.folder / "monitor.password").read_text().strip()}
            return subprocess.run(command, env=environment, capture_output=True).returncode == 0
        port = {"metrics": "9400", "gateway": "9500", "valkey": "6379"}[next(iter(wanted.values()))["port"]]
        try:
            if "tcpSocket" in wanted:
                socket.create_connection(("127.0.0.1", int(self.ports[port])), 5).close()
                return True
            with urllib.request.urlopen(f"http://127.0.0.1:{self.ports[port]}{wanted['httpGet']['path']}", timeout=5) as found:
                return found.status == 200
        except OSError:
            return False

    def steps(self) -> int:
        path = self.folder / "runs-learner" / RUN / "trained.jsonl"
        rows = path.read_text().splitlines() if path.exists() else []
        return max((json.loads(row).get("step", 0) for row in rows), default=0)

    def until_ready(self, name: str, kind: str, process: subprocess.Popen[bytes]) -> None:
        def ready() -> bool:
            assert process.poll() is None, (self.folder / f"{name}.out").read_text()
            return self.answers(name, kind, "readinessProbe")

        until(ready, f"{name} is ready", within_s=120)
        assert self.answers(name, kind, "livenessProbe")

    def ended(self, name: str, kind: str, process: subprocess.Popen[bytes]) -> int:
        """Send SIGTERM, as the kubelet does; the exit code within the grace period."""
        process.send_signal(signal.SIGTERM)
        return process.wait(pod_of(name, kind)["terminationGracePeriodSeconds"])


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    assert SERVER is not None
    for name in ("tls", "users", "etc/async-rl", "data"):
        (tmp_path / name).mkdir(parents=True)
    run = (MANIFESTS / "overlays" / "cpu" / "run.yaml").read_text()
    (tmp_path / "etc" / "async-rl" / "run.yaml").write_text(run)
    with private_server(SERVER) as url:  # it hashes passwords, and is forgotten
        create = commands(PAGE)[0].line.replace("run.yaml", "etc/async-rl/run.yaml").replace("unix:///tmp/redis.sock", url)
        made = finished(tmp_path, *create.split()[1:])
        assert made.returncode == 0, made.stderr
    users = tmp_path / "runs" / RUN / "users"
    for file in users.glob("*.password"):
        (tmp_path / file.name).write_text(file.read_text())
    (tmp_path / "users" / "users.acl").write_text((users / "users.acl").read_text())
    make_authority(tmp_path / "tls", "ca")
    make_certificate(tmp_path / "tls", "tls", names="DNS:localhost")
    return Cluster(tmp_path)


def test_a_server_whose_default_user_is_an_administrator_does_not_start(cluster: Cluster) -> None:
    users = cluster.folder / "users" / "users.acl"
    users.write_text(users.read_text().replace("user default off\n", ""))
    with cluster.container("valkey", "StatefulSet") as valkey:
        assert valkey.wait(30) == 1
    assert (cluster.folder / "valkey.out").read_text() == "users.acl lacks the line: user default off\n"


def test_the_commands_of_the_manifests_train_drain_and_resume(cluster: Cluster) -> None:
    with ExitStack() as started:
        valkey = started.enter_context(cluster.container("valkey", "StatefulSet"))
        cluster.until_ready("valkey", "StatefulSet", valkey)
        learner = started.enter_context(cluster.container("learner", "Job"))
        cluster.until_ready("learner", "Job", learner)
        worker = started.enter_context(cluster.container("worker", "Deployment"))
        cluster.until_ready("worker", "Deployment", worker)
        until(lambda: cluster.steps() >= 2, "it trains", within_s=120)

        assert cluster.ended("learner", "Job", learner) == ASKED_TO_END, "the Job starts it again"
        before = cluster.steps()
        again = started.enter_context(cluster.container("learner", "Job"))
        cluster.until_ready("learner", "Job", again)
        until(lambda: cluster.steps() >= before + 2, "it resumes", within_s=120)
        assert cluster.ended("worker", "Deployment", worker) == 0
        assert cluster.ended("learner", "Job", again) == ASKED_TO_END
        own = pod_of("learner", "Job")["containers"][0]["args"]
        words = cluster.words("learner", own[: own.index("--wire.host")])
        audited = finished(cluster.folder, "audit", *words)
        assert audited.returncode == 0, audited.stdout + audited.stderr
        assert cluster.ended("valkey", "StatefulSet", valkey) == 0
