"""The metrics of a real run explain where its time and its tokens went, and why its pace was what it was."""

from __future__ import annotations

from math import floor

import pytest

from async_rl.config import Config
from async_rl.replay_protocol import ROUNDING
from async_rl.telemetry import read_rows
from buffer.rules.ticket_record import parse_record
from buffer.tools.open_run import open_run
from learner.pace.controller import PaceController, PaceObservation
from learner.step_clock import IDLE
from tests.support.run_processes import program, read_config, write_config

Rows = list[dict[str, float]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, Rows]:
    folder = tmp_path_factory.mktemp("metrics")
    path = write_config(
        folder,
        "measured",
        staleness={"max_age": 4},
        learner={"steps": 40, "checkpoint_every": 10},
        batch={"drop_no_signal": True},
    )
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
        controller = controller.after(
            PaceObservation(
                reserved=int(row["pace/reserved"]),
                unreleased=int(row["pace/unreleased"]),
                pause_ahead=bool(row["pace/pause_ahead"]),
            )
        )
    assert len({row["pace/slots"] for row in rows}) > 1, "the pace changed, so the replay showed something"


async def test_every_token_that_was_generated_has_one_fate(run: tuple[Config, Rows]) -> None:
    config, rows = run
    for row in rows:
        dropped = sum(tokens for name, tokens in row.items() if name.startswith("tokens/dropped/"))
        assert row["tokens/generated"] == row["tokens/trained"] + dropped + row["tokens/in_flight"]
    assert rows[-1]["tokens/dropped/no_signal"] > 0
    assert rows[-1]["tokens/trained"] > 0
    async with open_run(config) as left:
        stats, records = await left.buffer.stats(), await left.redis.run_command("hvals", left.redis.key("records"))
    assert stats.tokens["trained"] == sum(row["batch/tokens"] for row in rows), "the last checkpoint contains every step"
    assert stats.tokens_in_flight == sum(record.tokens for record in map(parse_record, records) if record.state == "ready")
