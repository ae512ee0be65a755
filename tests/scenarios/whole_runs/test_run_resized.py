"""A run whose learner comes back with fewer ranks, and with more."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.support.run_history import check, last_step, lives, ranks_of_newest
from tests.support.run_processes import audit, program, read_config, write_config
from tests.support.waiting import until


@pytest.mark.slow
def test_a_learner_resumes_with_fewer_ranks_and_with_more(tmp_path: Path) -> None:
    path = write_config(tmp_path, "resized", learner={"steps": 200, "checkpoint_every": 3})
    config = read_config(path)
    with program(tmp_path, "run", "@", path, "--learner.parallel.processes", 2) as run:
        until(lambda: last_step(config) >= 4, "two ranks have trained", while_alive=run)
        run.signal(signal.SIGTERM)
        assert run.exit_code() == 0, run.output
    assert ranks_of_newest(config) == 2
    drained_after = last_step(config)

    with program(tmp_path, "run", "@", path, "--learner.parallel.processes", 1) as run:
        until(lambda: ranks_of_newest(config) == 1, "one rank has written a checkpoint", while_alive=run)
        until(lambda: last_step(config) % 3 == 1, "it is beyond that checkpoint", while_alive=run)
        run.signal(signal.SIGKILL)

    steps = last_step(config) + 4
    with program(tmp_path, "run", "@", path, "--learner.parallel.processes", 2, "--learner.steps", steps) as run:
        assert run.exit_code() == 0, run.output
        assert "Traceback" not in run.output
    assert ranks_of_newest(config) == 2
    first, second, third = lives(config)
    assert (first.resumed_after, second.resumed_after) == (0, drained_after)
    assert third.resumed_after > drained_after
    check(config, steps=steps)
    assert audit(path)["clean"]
