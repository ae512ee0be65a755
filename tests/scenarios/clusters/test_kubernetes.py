"""The commands and probes of deploy/kubernetes as processes of this machine: they train, answer, drain."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import reduce
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
    pytest.mark.timeout(900),
    pytest.mark.skipif(SERVER is None, reason="no server here was built with TLS (Debian's redis-server is)"),
]
MANIFESTS, RUN = ROOT / "deploy" / "kubernetes", "shapes"
PAGE = "docs/launch/kubernetes.md"
ASKED_TO_END = 75
PATIENCE_S = 240
SECRET_OF = {"evaluator": "worker"}
"""Whose password a pod has, if not its own."""


@dataclass(frozen=True, kw_only=True)
class Pod:
    name: str
    spec: Mapping[str, Any]
    index: int = 0
    """Among the pods of an Indexed Job."""

    @property
    def container(self) -> Mapping[str, Any]:
        return self.spec["containers"][0]

    @property
    def output(self) -> str:
        return f"{self.name}-{self.index}.out"


def pod_of(name: str, kind: str, *, folder: str = "base", patch: Sequence[Mapping[str, Any]] = (), index: int = 0) -> Pod:
    found = yaml.safe_load_all((MANIFESTS / folder / f"{name}.yaml").read_text())
    manifest = next(each for each in found if each["kind"] == kind)
    for change in patch:
        *way, last = change["path"].split("/")[1:]
        place = reduce(lambda inner, key: inner[int(key) if isinstance(inner, list) else key], way, manifest)
        if last == "-":
            place.append(change["value"])
        else:
            place[last] = change["value"]
    return Pod(name=name, spec=manifest["spec"]["template"]["spec"], index=index)


VALKEY, LEARNER, WORKER = pod_of("valkey", "StatefulSet"), pod_of("learner", "Job"), pod_of("worker", "Deployment")
EVALUATOR = pod_of("evaluator", "Deployment", folder="components/evaluator")
NODES = [
    pod_of("learner", "Job", index=index, patch=yaml.safe_load((MANIFESTS / "components/learner-nodes/job.yaml").read_text()))
    for index in range(2)
]
"""The pods of a learner on two nodes."""
FINAL = yaml.safe_load_all((MANIFESTS / "base" / "learner.yaml").read_text())
FINAL_CODES = {
    code
    for manifest in FINAL
    for rule in manifest["spec"].get("podFailurePolicy", {}).get("rules", ())
    for code in rule.get("onExitCodes", {}).get("values", ())
}
"""Exit codes after which the Job starts no pod again."""


def free_port() -> str:
    """One below those that the system gives to connections: it is used later."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return str(port)


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

    def words(self, pod: Pod, words: list[str]) -> list[str]:
        whole = {
            "/data": "data",
            "/runs": f"runs-{pod.name}",
            "/secrets/password": f"{SECRET_OF.get(pod.name, pod.name)}.password",
            "$(JOB_COMPLETION_INDEX)": str(pod.index),
        }
        here = {word: str(self.folder / name) if word.startswith("/") else name for word, name in whole.items()}
        return [self._local(here.get(word, word)) for word in words]

    def _local(self, text: str) -> str:
        for word, here in {**self._here, **self.ports}.items():
            text = text.replace(word, here)
        return text

    @contextmanager
    def container(self, pod: Pod) -> Iterator[subprocess.Popen[bytes]]:
        command = self.words(pod, [*pod.container["command"], *pod.container["args"]])
        with (self.folder / pod.output).open("ab") as output:
            process = subprocess.Popen(
                command, cwd=self.folder, env=self._environment(pod), stdout=output, stderr=output, start_new_session=True
            )
        try:
            yield process
        finally:
            kill(process)

    def _environment(self, pod: Pod) -> dict[str, str]:
        given = os.environ | {"PATH": f"{Path(ASYNC_RL).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
        return given | {
            "REDISCLI_AUTH": (self.folder / "monitor.password").read_text().strip(),
            "JOB_COMPLETION_INDEX": str(pod.index),
        }

    def answers(self, pod: Pod, probe: str) -> bool:
        """Whether a probe succeeds."""
        wanted: Mapping[str, Any] = pod.container[probe]
        if "exec" in wanted:
            command = self.words(pod, wanted["exec"]["command"])
            return subprocess.run(command, env=self._environment(pod), capture_output=True).returncode == 0
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

    def until_ready(self, pod: Pod, process: subprocess.Popen[bytes]) -> None:
        def ready() -> bool:
            assert process.poll() is None, (self.folder / pod.output).read_text()
            return self.answers(pod, "readinessProbe")

        until(ready, f"{pod.name} is ready", within_s=PATIENCE_S)
        assert self.answers(pod, "livenessProbe")

    def ended(self, pod: Pod, process: subprocess.Popen[bytes]) -> int:
        """Send SIGTERM, as the kubelet does; the exit code within the grace period."""
        process.send_signal(signal.SIGTERM)
        return process.wait(pod.spec["terminationGracePeriodSeconds"])

    def audit(self) -> None:
        own = LEARNER.container["args"]
        words = self.words(LEARNER, own[own.index("@") : own.index("--wire.host")])
        audited = finished(self.folder, "audit", *words)
        assert audited.returncode == 0, audited.stdout + audited.stderr


def kill(process: subprocess.Popen[bytes]) -> None:
    """All processes of a container at once, as the end of its machine does."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    assert SERVER is not None
    for name in ("tls", "users", "etc/async-rl", "data"):
        (tmp_path / name).mkdir(parents=True)
    run = (MANIFESTS / "overlays" / "cpu" / "run.yaml").read_text()
    (tmp_path / "etc" / "async-rl" / "run.yaml").write_text(run)
    with private_server(SERVER) as url:  # `buffer users create` hashes passwords there, and it is forgotten
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
    with cluster.container(VALKEY) as valkey:
        assert valkey.wait(30) == 1
    assert (cluster.folder / VALKEY.output).read_text() == "users.acl lacks the line: user default off\n"


def test_the_commands_of_the_manifests_train_drain_and_resume(cluster: Cluster) -> None:
    with ExitStack() as started:
        valkey = started.enter_context(cluster.container(VALKEY))
        cluster.until_ready(VALKEY, valkey)
        learner = started.enter_context(cluster.container(LEARNER))
        cluster.until_ready(LEARNER, learner)
        worker = started.enter_context(cluster.container(WORKER))
        cluster.until_ready(WORKER, worker)
        until(lambda: cluster.steps() >= 2, "it trains", within_s=PATIENCE_S)

        assert cluster.ended(LEARNER, learner) == ASKED_TO_END, "the Job starts it again"
        before = cluster.steps()
        again = started.enter_context(cluster.container(LEARNER))
        cluster.until_ready(LEARNER, again)
        until(lambda: cluster.steps() >= before + 2, "it resumes", within_s=PATIENCE_S)
        assert cluster.ended(WORKER, worker) == 0
        assert cluster.ended(LEARNER, again) == ASKED_TO_END
        cluster.audit()
        assert cluster.ended(VALKEY, valkey) == 0


def test_a_learner_of_two_pods_loses_one_and_resumes_and_an_evaluator_follows_it(cluster: Cluster) -> None:
    run = cluster.folder / "etc" / "async-rl" / "run.yaml"
    tree = yaml.safe_load(run.read_text())
    tree["learner"] |= {"parallel": {"processes": 2}, "checkpoint_every": 2}
    tree["evaluation"] = {"every": 2, "tasks": 1, "samples": 1}
    run.write_text(yaml.safe_dump(tree))
    first, second = NODES
    with ExitStack() as started:

        def learner() -> list[subprocess.Popen[bytes]]:
            pods = [started.enter_context(cluster.container(pod)) for pod in (second, first)]
            cluster.until_ready(first, pods[1])
            assert cluster.answers(second, "startupProbe")
            assert cluster.answers(second, "livenessProbe")
            return pods[::-1]

        valkey = started.enter_context(cluster.container(VALKEY))
        cluster.until_ready(VALKEY, valkey)
        pods = learner()
        worker = started.enter_context(cluster.container(WORKER))
        evaluator = started.enter_context(cluster.container(EVALUATOR))
        until(lambda: cluster.steps() >= 3, "it trains", within_s=PATIENCE_S)
        kill(pods[1])
        assert pods[0].wait(PATIENCE_S) not in {0, *FINAL_CODES}, "the Job starts both again"
        assert not cluster.answers(first, "livenessProbe")

        before = cluster.steps()
        pods = learner()
        until(lambda: cluster.steps() >= before + 2, "it resumes", within_s=PATIENCE_S)
        evaluated = cluster.folder / "runs-evaluator" / RUN / "eval"
        until(lambda: list(evaluated.glob("*.md")), "the evaluator has written a page", within_s=PATIENCE_S)
        assert cluster.ended(EVALUATOR, evaluator) == 0
        assert cluster.ended(WORKER, worker) == 0
        assert cluster.ended(first, pods[0]) == ASKED_TO_END
        assert pods[1].wait(PATIENCE_S) == ASKED_TO_END, "its Job is not complete, although its ranks ended well"
        cluster.audit()
        assert "resumes from step" in (cluster.folder / first.output).read_text()
        assert cluster.ended(VALKEY, valkey) == 0
