"""A training step that hangs, as in a stuck collective: the learner ends with the name of its thread, and the run goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.run_history import check, lives
from tests.support.run_processes import program, read_config, write_config

STEPS = 8
HANGS_ONCE = """\
import pathlib, time

calls = 0

def loss(current, behaviour, advantages, mask, normaliser):
    global calls
    calls += 1
    marker = pathlib.Path({marker!r})
    if calls == 3 and not marker.exists():  # not in the first step
        marker.touch()
        time.sleep(3600)
    return -((current - behaviour).exp() * advantages * mask).sum() / normaliser.tokens
"""


@pytest.mark.slow  # test_supervision.py shows how work that hangs ends its process
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_goes_on_after_a_training_step_that_hung(tmp_path: Path, ranks: int) -> None:
    code = tmp_path / "losses.py"
    code.write_text(HANGS_ONCE.format(marker=str(tmp_path / "hung")))
    path = write_config(
        tmp_path,
        "hangs",
        learner={
            "steps": STEPS, "checkpoint_every": 2, "objective": f"{code}:loss", "parallel": {"processes": ranks},
        },
        supervision={"work_limit_s": 10},
    )  # fmt: skip
    config = read_config(path)
    with program(tmp_path, "run", "@", path) as run:
        assert run.exit_code() == 0, run.output
    assert "learner exited with code 11 (ServiceStopped); restarting" in run.output
    said = run.output + "".join(log.read_text() for log in (config.run_folder / "logs").glob("rank-*.log"))
    assert "has worked on the order TrainStep for 10 s without finishing, at " in said
    if ranks == 1:  # of two, the other one may end first
        assert "at losses.py:11 in loss" in said
    assert len(lives(config)) == 2
    check(config, steps=STEPS)
