"""Each process started by hand, in the wrong order, and processes that do not belong to the run."""

from __future__ import annotations

import re
import signal
from contextlib import ExitStack
from pathlib import Path

from async_rl.errors import ConfigError, FleetMismatch, LearnerAlreadyRunning
from buffer.server.embedded.programs import find_binary
from tests.support.private_server import private_server
from tests.support.run_history import check, last_step, lives
from tests.support.run_processes import Program, audit, program, read_config, write_config
from tests.support.waiting import until

SLOW = {"pace_s": 0.5}
"""Few steps while other processes are started, which leaves cores to other tests."""


def test_processes_wait_for_what_they_miss_and_strangers_are_refused(tmp_path: Path) -> None:
    path = write_config(
        tmp_path,
        "by-hand",
        tasks=SLOW,
        learner={"steps": 10_000, "checkpoint_every": 50},
        leases={"learner_s": 60},  # a learner that stands still for a moment is not succeeded by the second one
    )
    config = read_config(path)
    with ExitStack() as started:

        def start(*arguments: object) -> Program:
            return started.enter_context(program(tmp_path, *arguments))

        worker = start("worker", "@", path)
        worker.until_says("waits for Redis at unix://")
        learner = start("learner", "@", path)
        learner.until_says("`async-rl buffer serve` starts it")
        server = start("buffer", "serve", "@", path)
        until(lambda: last_step(config) >= 1, "the run trains", while_alive=learner)

        second = start("learner", "@", path)
        stranger = start("worker", "@", path, "--model.size.hidden", 64)
        assert (second.exit_code(), stranger.exit_code()) == (LearnerAlreadyRunning.exit_code, FleetMismatch.exit_code)
        assert "holds run by-hand; stop it, or give this run another run.name" in the_sentence(second)
        assert "model.size.hidden is 64 here and 32 in the run" in the_sentence(stranger)

        learner.signal(signal.SIGTERM)
        assert learner.exit_code() == 0, learner.output
        assert learner.output.splitlines()[:2] == ["run by-hand", f"  folder   {config.run_folder}"]
        last_words = (
            r"ends after step \d+ of 10000, \d+:\d\d of training, reward \S+ in the last of them; start the learner again"
        )
        assert re.search(last_words, learner.output), learner.output
        assert "first weights loaded (version " in worker.output
        worker.signal(signal.SIGTERM)
        assert worker.exit_code() == 0, worker.output
        server.signal(signal.SIGTERM)
        assert server.exit_code() == 0, server.output
    (life,) = lives(config)
    check(config, steps=len(life.steps))
    assert audit(path)["clean"]


def test_each_role_runs_as_its_own_user_of_redis(tmp_path: Path) -> None:
    with private_server(find_binary()) as url, ExitStack() as started:
        endless = {"steps": 10_000, "checkpoint_every": 10}
        path = write_config(tmp_path, "users", tasks=SLOW, redis={"url": url}, learner=endless)
        config = read_config(path)

        def start(*arguments: object, user: str = "") -> Program:
            password = config.run_folder / "users" / f"{user}.password"
            login = ("--redis.user", f"users-{user}", "--redis.password_file", password) if user else ()
            return started.enter_context(program(tmp_path, *arguments, "@", path, *login))

        made = start("buffer", "users", "create")
        assert made.exit_code() == 0, made.output
        learner, worker = start("learner", user="learner"), start("worker", user="worker")
        until(lambda: last_step(config) >= 2, "the run trains", while_alive=learner)
        asked, attach = start("weights", "status", user="operator"), start("env", "attach", "counting", user="operator")
        assert (asked.exit_code(), attach.exit_code()) == (0, 0), asked.output + attach.output
        step = last_step(config)
        until(lambda: last_step(config) >= step + 6, "it trains on under another mix", while_alive=learner)
        looked = start("buffer", "audit", user="monitor")
        assert looked.exit_code() == 0, looked.output
        for words in (["env", "attach", "guess_number"], ["weights", "status"], ["buffer", "limits", "staleness.max_age=1"]):
            refused = start(*words, user="worker")
            assert refused.exit_code() == ConfigError.exit_code, refused.output
            assert "does not let its user do this" in the_sentence(refused)
        assert not worker.has_ended(), worker.output
        learner.signal(signal.SIGTERM)
        worker.signal(signal.SIGTERM)
        assert (learner.exit_code(), worker.exit_code()) == (0, 0), learner.output + worker.output


def the_sentence(refused: Program) -> str:
    """The last line: a learner first says which run it is of."""
    *first, sentence = refused.output.splitlines()
    assert all(line.startswith(("run ", "  ")) for line in first), refused.output
    return sentence


def test_a_process_that_still_waits_for_redis_ends_at_once(tmp_path: Path) -> None:
    path = write_config(tmp_path, "lonely", redis={"connect_timeout_s": 10_000})
    with program(tmp_path, "worker", "@", path) as worker:
        worker.until_says("waits for Redis")
        worker.signal(signal.SIGTERM)
        assert worker.exit_code() == -signal.SIGTERM
