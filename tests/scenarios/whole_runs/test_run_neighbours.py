"""Runs that share a Redis do not touch each other, and of two learners of one run only the later one counts."""

from __future__ import annotations

import re
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest
from redis import Redis

from async_rl.errors import FenceLost
from tests.support.run_history import check, last_step, lives, surviving
from tests.support.run_processes import Program, audit, program, read_config, write_config
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(900)


def test_two_runs_share_one_redis(tmp_path: Path, redis_server: str) -> None:
    names = ("neighbour-a", "neighbour-b")
    paths = [write_config(tmp_path, name, redis={"url": redis_server}, learner={"steps": 3}) for name in names]
    with program(tmp_path, "run", "@", paths[0]) as one, program(tmp_path, "run", "@", paths[1]) as other:
        assert (one.exit_code(), other.exit_code()) == (0, 0), one.output + other.output
    for path in paths:
        assert audit(path)["clean"]
        check(read_config(path), steps=3)
    with Redis.from_url(redis_server) as redis:
        tags = {key.decode().partition(":")[0] for key in redis.scan_iter("*neighbour-*")}
    assert tags == {f"{{{name}}}" for name in names}


@pytest.mark.slow
def test_a_learner_that_slept_through_its_successor_changes_nothing(tmp_path: Path) -> None:
    path = write_config(tmp_path, "fenced", learner={"steps": 10_000, "checkpoint_every": 10})
    config = read_config(path)
    with ExitStack() as started:

        def start(*arguments: object) -> Program:
            return started.enter_context(program(tmp_path, *arguments))

        start("buffer", "serve", "@", path).until_says("redis serves run")
        worker, sleeper = start("worker", "@", path), start("learner", "@", path)
        until(lambda: last_step(config) >= 12, "the first learner is beyond a checkpoint", while_alive=sleeper)
        sleeper.signal(signal.SIGSTOP)
        successor = start("learner", "@", path)
        until(lambda: len(lives(config)) == 2 and last_step(config) >= 15, "another goes on", while_alive=successor)
        sleeper.signal(signal.SIGCONT)
        assert sleeper.exit_code() == FenceLost.exit_code, sleeper.output
        assert re.search(r"was replaced by learner \d+ and may no longer change anything$", sleeper.output.rstrip())
        assert "Traceback" not in sleeper.output

        reached = last_step(config)
        until(lambda: last_step(config) >= reached + 5, "the successor is not disturbed", while_alive=successor)
        for process in (successor, worker):
            process.signal(signal.SIGTERM)
            assert process.exit_code() == 0, process.output
    assert audit(path)["clean"]
    check(config, steps=surviving(lives(config))[-1].number)
