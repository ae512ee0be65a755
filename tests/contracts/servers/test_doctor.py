"""`async-rl doctor` as a process, on this machine and real servers."""

from __future__ import annotations

import asyncio
import json
import re
import time
from pathlib import Path

from async_rl.board import shared_config
from async_rl.board.inbox import post
from async_rl.board.machines import MACHINES, own_machine
from async_rl.config import Config
from async_rl.config.loading import load
from async_rl.errors import ConfigError, UnfitMachine
from async_rl.protocols import Member
from async_rl.telemetry import WORKER_METRICS
from buffer import keys, open_board, open_buffer
from buffer.doctor.fleet_facts import gather_fleet
from buffer.server.embedded.programs import find_binary
from tests.support.private_server import client_of, private_server
from tests.support.run_processes import finished, read_config, write_config


def test_a_server_that_a_run_cannot_trust_is_bad_and_a_sound_one_is_not(tmp_path: Path) -> None:
    spoilt = ("--appendonly", "no", "--maxmemory-policy", "allkeys-lru")
    with private_server(find_binary(), *spoilt) as url:
        path = write_config(tmp_path, "fit", redis={"url": url})
        done = finished(tmp_path, "doctor", "@", path)
    assert done.returncode == UnfitMachine.exit_code, done.stdout + done.stderr
    assert "bad   redis persistence: appendonly is no" in done.stdout
    assert "bad   redis eviction: maxmemory-policy allkeys-lru" in done.stdout
    assert "2 checks are bad: redis persistence, redis eviction" in done.stderr

    with private_server(find_binary()) as url:
        path = write_config(tmp_path, "fit", redis={"url": url})
        done = finished(tmp_path, "doctor", "@", path, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["fit"]
    assert {"redis persistence", "redis eviction", "redis latency", "clock"} <= {each["check"] for each in found["checks"]}

    done = finished(tmp_path, "doctor", "@", path, "--redis.connect_timeout_s", "0.5")
    assert (done.returncode, "bad   redis: no Redis has answered" in done.stdout) == (UnfitMachine.exit_code, True)


def test_without_a_configuration_it_looks_at_the_machine(tmp_path: Path) -> None:
    done = finished(tmp_path, "doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "redis" not in done.stdout
    assert not list(tmp_path.glob(".async-rl-doctor*"))


def test_a_mistake_is_one_sentence(tmp_path: Path) -> None:
    done = finished(tmp_path, "doctor", "@", "none.yaml")
    assert (done.returncode, len(done.stderr.splitlines())) == (ConfigError.exit_code, 1)


async def share_configuration(config: Config) -> None:
    """As a learner does when it starts."""
    async with open_buffer(config) as buffer, open_board(config) as board:
        await shared_config.share(board, config, fence=await buffer.acquire("learner", config.limits))


def test_who_would_join_a_run_hears_what_a_worker_needs(tmp_path: Path) -> None:
    with private_server(find_binary()) as url:
        learners = write_config(tmp_path, "fit", redis={"url": url}, worker={"gateway": {"host": "127.0.0.1"}})
        asyncio.run(share_configuration(read_config(learners)))
        joining = ("doctor", "--join", url)
        done = finished(tmp_path, *joining, "--run.name", "fit", "--metrics.prometheus_port", 9400, "--json")
        assert done.returncode == 0, done.stdout + done.stderr
        checks = {each["check"] for each in json.loads(done.stdout)["checks"]}
        assert {"software", "port of worker.gateway", "redis persistence", "clock"} <= checks
        assert not {"port of wire.host", "port of metrics.prometheus_port"} & checks, "the learner's, on another machine"

        done = finished(tmp_path, *joining)
        assert (done.returncode, "add its user" in done.stderr) == (ConfigError.exit_code, True)
        done = finished(tmp_path, *joining, "--run.name", "other")
        assert (done.returncode, "run 'other' has no configuration in this Redis" in done.stderr) == (
            ConfigError.exit_code,
            True,
        )


def test_every_role_hears_what_the_fleet_runs(tmp_path: Path) -> None:
    with private_server(find_binary()) as url:
        path = write_config(tmp_path, "fit", redis={"url": url}, leases={"learner_s": 600})
        assert finished(tmp_path, "buffer", "users", "create", "@", path).returncode == 0
        users = tmp_path / "runs" / "fit" / "users"

        def words(role: str) -> list[str]:
            return [f"@{path}", "--redis.user", f"fit-{role}", "--redis.password_file", str(users / f"{role}.password")]

        asyncio.run(fleet_of_two(load(words("learner")), load(words("worker"))))
        with client_of(unix_socket_path=url.removeprefix("unix://")) as redis:
            posted_ms = int(time.time() + 3600) * 1000  # counters stay recent, however long the doctor takes to look at them
            said = json.dumps({"worker": "w1", "counters": {}, "time": posted_ms / 1000 + 600, "boot": ""})
            redis.xadd(keys.topic("fit", WORKER_METRICS), {"message": said}, id=f"{posted_ms}-0")
        for role in ("learner", "worker", "operator"):
            facts = asyncio.run(gather_fleet(load(words(role))))
            assert [each.name for each in facts.processes] == ["the learner", "e1", "silent", "w1"], facts.problem
        stranger = asyncio.run(gather_fleet(load([*words("monitor"), "--run.name", "other"])))
        assert "does not let its user do this" in stranger.problem
        done = finished(tmp_path, "doctor", *words("monitor"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ok    fleet: the learner, 2 workers, 1 evaluator, on 2 machines" in done.stdout
    assert "look  fleet: e1, silent say nothing of its software" in done.stdout
    assert re.search(r"look  fleet software: torch is .* for the learner, this machine, 2\.0\.0 for w1", done.stdout)
    assert re.search(r"look  fleet clocks: w1 on far: 600\.0 s ahead of Redis — start a time service", done.stdout)


async def fleet_of_two(learner: Config, worker: Config) -> None:
    """What a learner, a worker with another torch and another clock, and two members that say nothing leave in Redis."""
    async with open_buffer(learner) as buffer, open_board(learner) as board:
        await buffer.acquire("here:1", learner.limits)
        await post(board, MACHINES, own_machine("here:1").model_copy(update={"host": "here"}))
    async with open_board(worker) as board:
        for name in ("w1", "silent", "e1"):
            await board.announce(Member(id=name, host="far", version=-1, device="cpu", is_evaluator=name == "e1"), 3600)
        note = own_machine("w1")
        await post(board, MACHINES, note.model_copy(update={"software": {**note.software, "torch": "2.0.0"}, "time": 0.0}))
