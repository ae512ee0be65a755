"""`kill -9` of the processes of a run: it goes on to its last step, and nothing was trained twice or lost."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from async_rl.durable.failpoints import ORDERS
from tests.support.run_history import check, last_step, lives
from tests.support.run_processes import audit, pid_of, program, read_config, redis_pid, write_config
from tests.support.waiting import until

HANGS_AT = 17
"""With 2 groups per step and 6 slots, the ticket of task 17 is issued at a version from 6 to 8. While it hangs, the learner
goes on for two steps and then waits for it: after step 8, 9 or 10, so always between the checkpoints of steps 6 and 12."""


@pytest.mark.slow  # the eight faults of test_chaos.py contain these
def test_a_run_survives_kills_of_its_worker_its_learner_and_its_server(tmp_path: Path) -> None:
    marker = tmp_path / "hangs"
    path = write_config(
        tmp_path,
        "crashes",
        tasks={"hangs_at": HANGS_AT, "marker": str(marker)},
        learner={"steps": 18, "checkpoint_every": 6},
        leases={"learner_s": 3600},  # the next learner knows that this one is dead
    )
    config = read_config(path)
    with program(tmp_path, "run", "@", path) as run:
        until(lambda: marker.exists() and last_step(config) >= 8, "the learner waits for a task that hangs", while_alive=run)
        worker, learner = pid_of(config, "worker-0"), pid_of(config, "learner")
        os.kill(worker, signal.SIGKILL)
        os.kill(learner, signal.SIGKILL)
        until(lambda: last_step(config) >= 13, "the next learner is beyond a checkpoint of its own", while_alive=run)
        os.kill(redis_pid(config), signal.SIGKILL)
        assert run.exit_code() == 0, run.output

    assert pid_of(config, "worker-0") != worker
    assert pid_of(config, "learner") != learner
    first, second = lives(config)
    assert (first.resumed_after, second.resumed_after) == (0, 6)
    assert len(first.steps) >= 8
    check(config, steps=18)

    said = audit(path)
    assert said["clean"]
    assert said["stats"]["dropped"]["lease_lost"] >= 1, "the worker held no ticket when it was killed"
    assert said["stats"]["reserved"] == 0
    assert "worker-0 was ended by SIGKILL; restarting" in run.output
    assert "learner was ended by SIGKILL; restarting" in run.output
    assert "Traceback" not in run.output


@pytest.mark.slow
def test_a_run_survives_that_a_rank_of_its_learner_dies_while_it_sends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ORDERS, "wire.order:6")  # of each life; rank 0 gets no orders
    path = write_config(
        tmp_path,
        "half-a-learner",
        wire={"shared_memory": False, "operation_timeout_s": 2},
        learner={"steps": 8, "checkpoint_every": 2, "parallel": {"tensor": 2, "processes": 2}},
        leases={"learner_s": 3600},
    )
    config = read_config(path)
    with program(tmp_path, "run", "@", path) as run:
        assert run.exit_code() == 0, run.output
    assert "learner exited with code 137; restarting" in run.output
    assert "rank 1 of 2 was ended by SIGKILL" in run.output
    assert len(lives(config)) == 2
    check(config, steps=8)
    assert audit(path)["clean"]
    assert "Traceback" not in run.output


SEED = 20
STEPS = 100


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_run_survives_kills_of_everything_at_random_moments(tmp_path: Path) -> None:
    chance = random.Random(SEED)
    path = write_config(
        tmp_path,
        "chaos",
        staleness={"max_age": 8},
        learner={"steps": STEPS, "checkpoint_every": 5},
        worker={"processes": 2, "groups_in_flight": 3},
    )
    config = read_config(path)
    victims = ["learner", "worker-0", "redis", "buffer"] * 2
    chance.shuffle(victims)
    with program(tmp_path, "run", "@", path) as run:
        for victim in [*victims, "supervisor"]:
            goal = last_step(config) + chance.randint(1, 6)
            until(lambda goal=goal: last_step(config) >= goal, f"step {goal} is trained", while_alive=run)
            time.sleep(chance.random() * 0.2)  # not always just after a step
            if victim == "supervisor":
                run.signal(signal.SIGKILL)
            else:
                os.kill(redis_pid(config) if victim == "redis" else pid_of(config, victim), signal.SIGKILL)
    with program(tmp_path, "run", "@", path) as again:
        assert again.exit_code() == 0, again.output
    assert len(lives(config)) == 4
    check(config, steps=STEPS)
    said = audit(path)
    assert said["clean"]
    assert said["stats"]["reserved"] == 0
    assert "Traceback" not in run.output + again.output
