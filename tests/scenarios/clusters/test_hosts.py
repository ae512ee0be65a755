"""A run on five hosts: Redis with TLS, two ranks, two workers. Hosts are cut off and come back; connections are reset."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from async_rl.config import Config
from async_rl.recording.reading import Recording
from tests.support.certificates import make_authority, make_certificate
from tests.support.network_hosts import Host, hosts, missing
from tests.support.private_server import binaries
from tests.support.repository import ROOT, module_command
from tests.support.run_history import check, last_step, lives
from tests.support.run_processes import ASYNC_RL, read_config, write_config
from tests.support.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing()), pytest.mark.timeout(900)]

PASSWORD = "not on this network in clear"
EVENT_S = 300.0


class HostProcess:
    """An `async-rl` process on a host; what it prints is in a file."""

    def __init__(self, process: subprocess.Popen[bytes], output: Path) -> None:
        self._process, self._output = process, output

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def exit_code(self) -> int:
        return self._process.wait(EVENT_S)

    def signal(self, number: signal.Signals) -> None:
        """Send it to the program, the first process of its namespace."""
        (inner,) = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        os.kill(int(inner), number)

    def terminate(self) -> None:
        self.signal(signal.SIGTERM)

    def until_says(self, text: str, times: int = 1) -> None:
        until(lambda: self.output.count(text) >= times, f"{text!r} is printed", while_alive=self, within_s=EVENT_S)


@contextmanager
def on(host: Host, folder: Path, *command: object, **environment: str) -> Iterator[HostProcess]:
    output = folder / f"{host.name}-{len(list(folder.glob('*.out')))}.out"
    given = os.environ | {"OMP_NUM_THREADS": "1", "ASYNC_RL_REDIS_PASSWORD": PASSWORD} | environment
    with output.open("wb") as file:
        process = subprocess.Popen(host.command(folder, command), env=given, stdout=file, stderr=file)
    try:
        yield HostProcess(process, output)
    finally:
        process.kill()  # and with it, its namespace
        process.wait()


@contextmanager
def redis_with_tls(host: Host, folder: Path) -> Iterator[HostProcess]:
    binary = next((path for path in binaries().values() if _has_tls(path)), None)
    if binary is None:
        pytest.skip("no server here was built with TLS (Debian's redis-server is)")
    files = ("--tls-cert-file", "server.crt", "--tls-key-file", "server.key", "--tls-ca-cert-file", "ca.crt")
    listens = ("--bind", host.address, "--port", 0, "--tls-port", 6379, "--tls-auth-clients", "no")
    kept = ("--requirepass", PASSWORD, "--appendonly", "yes", "--save", "", "--maxmemory-policy", "noeviction")
    with on(host, folder, binary, *listens, *files, *kept) as server:
        server.until_says("Ready to accept connections")
        yield server


def _has_tls(binary: Path) -> bool:
    return b"SSL_CTX_new" in binary.read_bytes()


def connected(host: Host) -> list[str]:
    """A host's established connections to Redis."""
    table = subprocess.run(
        ["ip", "netns", "exec", host.namespace, "ss", "--no-header", "--tcp", "state", "established", "dport", "=", "6379"],
        capture_output=True,
        text=True,
        check=True,
    )
    return table.stdout.splitlines()


def trusted(folder: Path) -> None:
    make_authority(folder, "ca")
    make_certificate(folder, "server", names="DNS:store")


def config_of(folder: Path, *, wire: Mapping[str, Any], steps: int) -> tuple[Path, Config]:
    path = write_config(
        folder,
        "apart",
        tasks={"pace_s": 0.5},
        redis={"url": "rediss://store:6379", "ca_file": str(folder / "ca.crt")},
        learner={"steps": steps, "checkpoint_every": 10, "optimizer": {"learning_rate": 1e-3}},
        wire=wire,
    )
    return path, read_config(path)


def pushed(config: Config, how: str) -> set[str]:
    """The hosts whose workers were pushed weights in this way, as the run's recording says."""
    pushes = Recording(config.run_folder).events(kinds=["push"])
    ways = [(member, way) for push in pushes for member, way in push.fields["how"].items()]
    return {member.partition("-")[0] for member, way in ways if way.partition(",")[0] == how}


def test_ranks_and_workers_on_hosts_of_their_own_train_while_one_is_cut_off(tmp_path: Path) -> None:
    trusted(tmp_path)
    with hosts("store", "lead", "second", "near", "far") as found, ExitStack() as started:
        path, config = config_of(tmp_path, wire={"host": found["lead"].address, "insecure": True}, steps=10_000)
        started.enter_context(redis_with_tls(found["store"], tmp_path))

        def start(host: str, *words: object, **environment: str) -> HostProcess:
            return started.enter_context(on(found[host], tmp_path, ASYNC_RL, *words, **environment))

        place = {"WORLD_SIZE": "2", "LOCAL_RANK": "0"}
        ranks = [start(host, "learner", "@", path, RANK=str(rank), **place) for rank, host in enumerate(("lead", "second"))]
        own_folders = {host: ("--run.folder", tmp_path / host) for host in ("near", "far")}  # nothing is shared with workers
        near, far = (start(host, "worker", "@", path, *words) for host, words in own_folders.items())

        def until_steps(more: int) -> None:
            before = last_step(config)
            until(lambda: last_step(config) >= before + more, f"{more} more steps", while_alive=ranks[0], within_s=EVENT_S)

        until_steps(3)
        for worker in (near, far):
            worker.until_says("first weights loaded")
            assert "from the learner's memory" not in worker.output  # over gloo, or pulled over HTTP
        until(lambda: pushed(config, "gloo") >= {"near", "far"}, "pushes over gloo reach both", while_alive=ranks[0])

        found["far"].cut()
        ranks[0].until_says("left out of a weight push")
        until_steps(5)
        found["far"].join()
        found["near"].cut()
        until_steps(5)  # by the one that came back, with newer weights
        found["near"].join()
        found["store"].cut()
        until(lambda: not connected(found["lead"]), "the kernel gives the learner's connections to Redis up")
        found["store"].join()
        until_steps(5)

        ranks[0].terminate()
        assert [rank.exit_code() for rank in ranks] == [0, 0], [rank.output for rank in ranks]
        for worker in (near, far):
            worker.terminate()
            assert worker.exit_code() == 0, worker.output
        (life,) = lives(config)
        check(config, steps=len(life.steps))
        audited = start("lead", "audit", "@", path)
        assert audited.exit_code() == 0, audited.output


@pytest.mark.parametrize("behind", ["worker", "learner"])
def test_a_network_that_is_late_and_resets_connections_to_redis_costs_no_group(behind: str, tmp_path: Path) -> None:
    trusted(tmp_path)
    with hosts("store", "lead", "far") as found, ExitStack() as started:
        path, config = config_of(tmp_path, wire={"host": found["lead"].address, "insecure": True}, steps=10_000)
        started.enter_context(redis_with_tls(found["store"], tmp_path))
        relayed = module_command("tests.support.network_relay", "0.0.0.0:6380", f"{found['store'].address}:6379")
        relay = started.enter_context(on(found["store"], tmp_path, *relayed, PYTHONPATH=str(ROOT)))
        relay.until_says("relays to")
        urls = {role: "rediss://store:6380" if role == behind else "rediss://store:6379" for role in ("worker", "learner")}
        learner, worker = (
            started.enter_context(on(found[host], tmp_path, ASYNC_RL, role, "@", path, "--redis.url", urls[role]))
            for host, role in (("lead", "learner"), ("far", "worker"))
        )

        def until_steps(more: int) -> None:
            before = last_step(config)
            until(lambda: last_step(config) >= before + more, f"{more} more steps", while_alive=learner, within_s=EVENT_S)

        for times in range(1, 6):
            until_steps(3)
            relay.signal(signal.SIGUSR1)
            relay.until_says("reset ", times)
        until_steps(3)
        assert sum(map(int, re.findall(r"reset (\d+) connections", relay.output))) > 0
        until(lambda: pushed(config, "gloo") == {"far"}, "a push over gloo reaches the worker", while_alive=learner)

        learner.terminate()
        assert learner.exit_code() == 0, learner.output
        worker.terminate()
        assert worker.exit_code() == 0, worker.output
        (life,) = lives(config)
        check(config, steps=len(life.steps))
        audited = started.enter_context(on(found["lead"], tmp_path, ASYNC_RL, "audit", "@", path))
        assert audited.exit_code() == 0, audited.output


def test_ranks_under_torchrun_on_two_hosts_train_to_the_last_step(tmp_path: Path) -> None:
    trusted(tmp_path)
    with hosts("store", "lead", "second", "near") as found, ExitStack() as started:
        lead = found["lead"].address
        path, config = config_of(tmp_path, wire={"host": lead, "insecure": True}, steps=5)
        started.enter_context(redis_with_tls(found["store"], tmp_path))
        meeting = ("--rdzv-backend", "static", "--master-addr", lead, "--master-port", 29500)
        ranks = [
            started.enter_context(
                on(
                    found[host],
                    tmp_path,
                    *(ASYNC_RL.with_name("torchrun"), "--nnodes", 2, "--node-rank", number, "--nproc-per-node", 1, *meeting),
                    *("--no-python", ASYNC_RL, "learner", "@", path),
                )
            )
            for number, host in enumerate(("lead", "second"))
        ]
        started.enter_context(on(found["near"], tmp_path, ASYNC_RL, "worker", "@", path))
        assert [rank.exit_code() for rank in ranks] == [0, 0], [rank.output for rank in ranks]
        check(config, steps=5)


def test_a_learner_that_others_would_not_reach_says_so(tmp_path: Path) -> None:
    trusted(tmp_path)
    with hosts("store", "lead") as found, redis_with_tls(found["store"], tmp_path):
        path, _ = config_of(tmp_path, wire={"host": "lead", "insecure": True}, steps=1)
        with on(found["lead"], tmp_path, ASYNC_RL, "learner", "@", path) as named:
            named.until_says("wire.host: 'lead' is 127.0.1.1 on this machine, which no other machine reaches")
        path, _ = config_of(tmp_path, wire={}, steps=1)
        with on(found["lead"], tmp_path, ASYNC_RL, "learner", "@", path) as default:
            default.until_says(f"set wire.host: {found['lead'].address}")
