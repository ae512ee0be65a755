"""Rows longer than a bin, and rows longer than any may be, end no run: not the learner that takes them, and not the next."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from async_rl.config import Config
from async_rl.telemetry import read_rows
from tests.support.run_history import check, lives
from tests.support.run_processes import audit, pid_of, program, read_config, write_config
from tests.support.waiting import until

NEVER = 1_000_000


@pytest.mark.slow  # test_batch.py shows what becomes of long rows, test_chaos.py that a killed learner has a successor
def test_long_rows_are_trained_or_counted_by_a_learner_its_successor_and_the_run_that_is_started_again(tmp_path: Path) -> None:
    path = write_config(
        tmp_path,
        "long",
        environment="Lengthy",
        tasks={"pace_s": 0.02, "long": 100, "too_long": 200},
        model={"max_sequence": 128},
        batch={"bin_tokens": 64},
        learner={"steps": 16, "checkpoint_every": NEVER},
        leases={"learner_s": 3600},  # the next learner knows that this one is dead
    )
    config = read_config(path)
    with program(tmp_path, "run", "@", path) as run:
        until(lambda: counted(config, "batch/too_long") > 0, "rows are cut", while_alive=run)
        os.kill(pid_of(config, "learner"), signal.SIGKILL)
        assert run.exit_code() == 0, run.output
    assert [life.resumed_after for life in lives(config)] == [0, 0], "what was taken before was not taken again"
    assert counted(config, "batch/oversize") >= counted(config, "batch/too_long") + 2, "long rows have bins of their own"
    cut = counted(config, "batch/too_long")
    assert cut >= 4

    options = ["--batch.too_long", "drop", "--learner.steps", 32]
    with program(tmp_path, "run", "@", config.run_folder / "config.yaml", *options) as again:
        assert again.exit_code() == 0, again.output
    assert counted(config, "batch/too_long") >= cut + 4
    assert counted(config, "batch/tokens") < 128 * counted(config, "batch/bins")
    check(config, steps=32)
    assert audit(path)["clean"]


def counted(config: Config, metric: str) -> float:
    path = config.run_folder / "metrics.jsonl"
    return sum(row.values.get(metric, 0) for row in read_rows(path)) if path.exists() else 0
