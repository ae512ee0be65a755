"""The metrics of a real run explain where its time went, and why its pace was what it was."""

from __future__ import annotations

from math import floor

import pytest

from async_rl.config import Config
from async_rl.replay_protocol import ROUNDING
from async_rl.telemetry import read_rows
from learner.pace.controller import PaceController, PaceObservation
from learner.step_clock import IDLE
from tests.support.run_processes import program, read_config, write_config

Rows = list[dict[str, float]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, Rows]:
    folder = tmp_path_factory.mktemp("metrics")
    path = write_config(folder, "measured", staleness={"max_age": 4}, learner={"steps": 40, "checkpoint_every": 10})
    with program(folder, "run", "@", path) as started:
        assert started.exit_code() == 0, started.output
    config = read_config(path)
    rows = [dict(row.values) for row in read_rows(config.run_folder / "metrics.jsonl") if "reward/mean" in row.values]
    assert len(rows) == config.learner.steps
    return config, rows


def test_idle_time_has_causes(run: tuple[Config, Rows]) -> None:
    _, rows = run
    for row in rows:
        shares = {cause: row[f"idle/{cause}"] for cause in IDLE}
        assert all(share >= 0 for share in shares.values())
        assert sum(shares.values()) < 1, "each step also trained"
    assert all(any(row[f"idle/{cause}"] > 0 for row in rows) for cause in IDLE)


def test_every_decision_about_the_pace_can_be_replayed(run: tuple[Config, Rows]) -> None:
    config, rows = run
    groups, most = config.batch.groups_per_step, config.limits.max_slots
    controller = PaceController(groups_per_step=groups)
    for row in rows:
        assert row["pace/slots"] == min(most, floor(controller.pace * groups + ROUNDING))
        seen = PaceObservation(reserved=int(row["pace/reserved"]), unreleased=int(row["pace/unreleased"]))
        controller = controller.after(seen)
    assert len({row["pace/slots"] for row in rows}) > 1, "the pace changed, so the replay showed something"
