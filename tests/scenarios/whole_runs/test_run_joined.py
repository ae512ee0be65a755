"""Two nodes by hand, as docs/launch/by_hand.md types them: a learner, workers that know an address and a password."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from async_rl import __version__
from async_rl.config import Config
from async_rl.errors import BufferUnreachable, ConfigError, FleetMismatch
from async_rl.view.live import LiveState, WorkerState
from buffer.server.embedded.programs import find_binary
from buffer.view.live_run import RedisLiveSource
from tests.support.page_commands import commands
from tests.support.private_fleet import free_port
from tests.support.private_server import client_of, private_server
from tests.support.run_history import last_step
from tests.support.run_processes import TASKS, Program, audit, finished, program, read_config, write_config
from tests.support.waiting import eventually, until

EVALUATION = ("--evaluation.every", 2, "--evaluation.tasks", 1, "--evaluation.samples", 1)
PAGE, RUN = "docs/launch/by_hand.md", "shapes"
SHARED, MEMBERS = f"{{{RUN}}}:note:configuration", f"{{{RUN}}}:members"
CREATE, LEARN, JOIN, LS, DRAIN, STOP = commands(PAGE)
"""buffer users create; learner; worker --join; fleet ls, fleet drain, fleet stop."""


@dataclass(frozen=True, kw_only=True)
class Nodes:
    first: Path
    """Folder of the learner's machine."""
    second: Path
    """Folder of the workers'."""
    path: Path
    port: int
    redis: Any
    """A client with all rights."""

    def words(self, line: str) -> list[str]:
        """Those of a command of the page, without TLS and at this server."""
        line = re.sub(r" --redis.ca_file \S+", "", line).replace("rediss://", "redis://")
        found = line.replace("redis.internal:6379", f"127.0.0.1:{self.port}").replace("'", "")
        return found.split()[1:]

    def fleet(self, line: str) -> tuple[int, str]:
        """Exit code and last line of a command of the operator's."""
        done = finished(self.first / "runs" / RUN / "users", *self.words(line))
        return done.returncode, (done.stdout + done.stderr).strip()

    def learn(self, stack: ExitStack) -> Program:
        """Start the learner; returns when it has shared its configuration."""
        learner = stack.enter_context(program(self.first, *self.words(LEARN.line)))
        until(lambda: self.redis.exists(SHARED), "the learner has shared its configuration", while_alive=learner)
        return learner

    def join(self, stack: ExitStack, *more: str, without: str = "") -> Program:
        words = [word for word in self.words(JOIN.line.replace(without, "")) if word]
        return stack.enter_context(program(self.second, *words, *more))


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
        shutil.copy(TASKS, folder / "my_environment.py")
    (second / "my_environment.py").write_text(f"{TASKS.read_text()}\nPath('loaded').touch()\n")  # leaves a trace
    port = free_port()
    options = ("--port", str(port), "--bind", "127.0.0.1")
    with private_server(find_binary(), *options) as url:
        endless = {"steps": 10_000, "checkpoint_every": 10}
        leases = {"learner_s": 60, "member_s": 60}  # who stands still for a moment is listed and counted as well
        path = write_config(first, RUN, redis={"url": url}, learner=endless, leases=leases, tasks={"pace_s": 0.2})
        content = yaml.safe_load(path.read_text().replace(f"{TASKS}:", "my_environment.py:"))
        (first / "run.yaml").write_text(yaml.safe_dump({**content, "run": {"name": RUN}}))
        with client_of(unix_socket_path=url.removeprefix("unix://")) as redis:
            yield Nodes(first=first, second=second, path=path, port=port, redis=redis)


def test_workers_join_by_an_address_and_an_operator_lists_drains_and_stops_them(nodes: Nodes) -> None:
    config = read_config(nodes.path)
    assert finished(nodes.first, *nodes.words(CREATE.line)).returncode == 0
    shutil.copy(nodes.first / "runs" / RUN / "users" / "worker.password", nodes.second)
    with ExitStack() as started:
        early = nodes.join(started)
        assert early.exit_code() == ConfigError.exit_code
        assert "run 'shapes' has no configuration in this Redis" in early.output

        learner = nodes.learn(started)
        first = nodes.join(started)
        until(lambda: last_step(config) >= 2, "what it rolls out is trained", while_alive=first)
        assert (nodes.second / "loaded").exists(), "with the code that lies on its own machine"
        second = nodes.join(started)
        evaluator = started.enter_context(program(nodes.first, "evaluator", "@", "run.yaml", *EVALUATION))
        until(lambda: nodes.fleet(LS.line)[1].count(" cpu, version") == 2, "both are listed", while_alive=second)
        top, *workers = nodes.fleet(LS.line)[1].splitlines()
        assert top.startswith("learner  ")
        third = finished(nodes.second, "doctor", *nodes.words(JOIN.line)[1:])  # a machine that might join
        assert "ok    fleet: the learner, " in third.stdout, third.stderr
        assert "says nothing" not in third.stdout
        assert f"ok    fleet software: the same everywhere: async_rl {__version__}" in third.stdout
        assert "fleet clocks: " in third.stdout
        at_home = finished(nodes.first, "fleet", "ls", "@", "run.yaml")  # over redis.url, without an address
        assert at_home.stdout.startswith("learner  "), at_home.stderr
        (name,) = [line.split()[0] for line in workers if f"-{first.pid}-" in line]

        assert nodes.fleet(DRAIN.line.replace("NAME", name)) == (0, f"{name} has drained")
        assert first.exit_code() == 0, first.output
        code, said = nodes.fleet(DRAIN.line.replace("NAME", name))
        assert (code, f"there is no worker {name!r}" in said) == (ConfigError.exit_code, True)
        code, said = nodes.fleet(STOP.line.replace("operator", "worker"))
        assert (code, "does not let its user do this" in said) == (ConfigError.exit_code, True)
        code, said = nodes.fleet(STOP.line.replace("stop", "scale 3"))
        assert (code, "can scale a fleet, and neither" in said) == (ConfigError.exit_code, True)
        step = last_step(config)
        until(lambda: last_step(config) >= step + 2, "the other one goes on", while_alive=second)

        evaluator.until_says("evaluated step")
        assert nodes.fleet(STOP.line) == (0, "the fleet drains: the learner, workers: 1")
        assert (learner.exit_code(), second.exit_code()) == (0, 0), learner.output + second.output
        assert evaluator.exit_code() == 0, evaluator.output
    assert audit(nodes.path)["clean"]
    assert list((config.run_folder / "checkpoints").iterdir())


def test_an_evaluator_that_waits_for_a_version_is_no_worker_of_the_fleet(nodes: Nodes) -> None:
    assert finished(nodes.first, *nodes.words(CREATE.line)).returncode == 0
    with ExitStack() as started:
        learner = nodes.learn(started)
        always = (*EVALUATION, "--evaluation.every", 1)  # without workers, the version after the first never comes
        evaluator = started.enter_context(program(nodes.first, "evaluator", "@", "run.yaml", *always))
        evaluator.until_says("evaluated step 0")
        until(lambda: nodes.redis.zcard(MEMBERS), "it is a member again", while_alive=evaluator)
        (name,) = (found.decode() for found in nodes.redis.zrange(MEMBERS, 0, -1))

        code, said = nodes.fleet(LS.line)
        assert (code, said.startswith("learner  "), len(said.splitlines())) == (0, True, 1), said
        code, said = nodes.fleet(DRAIN.line.replace("NAME", name))
        assert (code, f"there is no worker {name!r}; there are none" in said) == (ConfigError.exit_code, True), said
        assert asyncio.run(shown_workers(read_config(nodes.path))) == ()
        assert nodes.fleet(STOP.line) == (0, "the fleet drains: the learner, workers: 0")
        assert (learner.exit_code(), evaluator.exit_code()) == (0, 0), learner.output + evaluator.output


async def shown_workers(config: Config) -> tuple[WorkerState, ...]:
    """Workers on the page of `async-rl view`."""
    async with RedisLiveSource(config) as run:
        seen: list[LiveState] = []

        async def answers() -> bool:
            """The page waits for Redis for two seconds, and asks again."""
            state = await run.read()
            seen.extend([state] if isinstance(state, LiveState) else [])
            return bool(seen)

        await eventually(answers, "Redis answers the page")
        return seen[0].workers


def test_a_worker_joins_nothing_that_it_was_not_made_for(nodes: Nodes) -> None:
    assert finished(nodes.first, *nodes.words(CREATE.line)).returncode == 0
    shutil.copy(nodes.first / "runs" / RUN / "users" / "worker.password", nodes.second)
    with ExitStack() as started:
        nodes.learn(started)

        def refused(code: int, *more: str, without: str = "") -> str:
            worker = nodes.join(started, *more, without=without)
            assert worker.exit_code() == code, worker.output
            return worker.output.splitlines()[-1]  # the first line may be that it waits for a busy Redis

        permission = "--environments_from '[my_environment.py]'"
        said = refused(ConfigError.exit_code, without=permission)
        assert f"--environments_from '[{nodes.second}/my_environment.py]' allows it" in said
        assert "add its user" in refused(ConfigError.exit_code, without="shapes-worker@")
        assert "refuses our password" in refused(BufferUnreachable.exit_code, "--redis.user", "shapes-learner")
        shared = json.loads(nodes.redis.get(SHARED))
        nodes.redis.set(SHARED, json.dumps({**shared, "protocol": 999, "release": "9.9"}))
        assert "install async_rl 9.9 here" in refused(FleetMismatch.exit_code)
        nodes.redis.set(SHARED, json.dumps({**shared, "config": {**shared["config"], "model": {"newer": 3}}}))
        assert "does not fit this async_rl" in refused(FleetMismatch.exit_code)
        nodes.redis.set(SHARED, json.dumps({**shared, "config": {**shared["config"], "environments_from": ["/"]}}))
        assert "sets environments_from, which is this machine's own" in refused(FleetMismatch.exit_code, without=permission)
        doctor = finished(nodes.second, "doctor", *nodes.words(JOIN.line)[1:])
        assert (doctor.returncode, "sets environments_from" in doctor.stderr) == (FleetMismatch.exit_code, True)
    assert not (nodes.second / "loaded").exists(), "no code of the run was loaded"
