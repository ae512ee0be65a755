"""Metrics and recording of a real run explain where its time, groups and tokens went, and why its pace was what it was."""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import floor

import numpy as np
import pytest
import torch

from async_rl.cli.main import dispatch
from async_rl.config import Config
from async_rl.recording import Recording, RolloutFilter
from async_rl.replay_protocol import ROUNDING
from async_rl.telemetry import read_rows
from buffer.rules.ticket_record import parse_record
from buffer.tools.open_run import open_run
from learner.pace.controller import PaceController, PaceObservation
from learner.step_clock import IDLE
from tests.support.otlp_receiver import OtlpReceiver, otlp_receiver
from tests.support.run_processes import program, read_config, write_config

Rows = list[dict[str, float]]


@pytest.fixture(scope="module")
def spans() -> Iterator[OtlpReceiver]:
    with otlp_receiver() as receiver:
        yield receiver


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, spans: OtlpReceiver) -> tuple[Config, Rows]:
    folder = tmp_path_factory.mktemp("metrics")
    path = write_config(
        folder,
        "measured",
        staleness={"max_age": 4},
        learner={"steps": 40, "checkpoint_every": 10},
        batch={"drop_no_signal": True},
        recording={"otlp_endpoint": spans.url},
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
                held_back=bool(row["pace/held_back"]),
                pause_ahead=bool(row["pace/pause_ahead"]),
            )
        )
    assert len({row["pace/slots"] for row in rows}) > 1, "the pace changed, so the replay showed something"


def test_memory_is_that_of_a_process_with_a_model(run: tuple[Config, Rows]) -> None:
    _, rows = run
    assert all(2**26 < row["memory/host"] < 2**40 for row in rows)
    assert all(("memory/gpu" in row) == torch.cuda.is_available() for row in rows)


async def test_every_token_that_was_generated_has_one_fate(run: tuple[Config, Rows]) -> None:
    config, rows = run
    for row in rows:
        dropped = sum(tokens for name, tokens in row.items() if name.startswith("tokens/dropped/"))
        assert row["tokens/generated"] == row["tokens/trained"] + dropped + row["tokens/in_flight"]
    assert rows[-1]["tokens/dropped/no_signal"] > 0
    assert rows[-1]["tokens/trained"] == sum(row["batch/tokens"] for row in rows), "the last row has the last checkpoint"
    async with open_run(config) as left:
        stats, records = await left.buffer.stats(), await left.redis.run_command("hvals", left.redis.key("records"))
    assert stats.tokens["trained"] == sum(row["batch/tokens"] for row in rows), "the last checkpoint contains every step"
    assert stats.tokens_in_flight == sum(record.tokens for record in map(parse_record, records) if record.state == "ready")


def test_the_recording_shows_the_life_of_every_group_and_process(run: tuple[Config, Rows]) -> None:
    config, rows = run
    recording, steps = Recording(config.run_folder), config.learner.steps
    assert recording.events_let_go().is_everything_kept

    trained = recording.rollouts(RolloutFilter(fate="trained"), limit=10**6)
    assert trained.total == sum(row["batch/sequences"] for row in rows)
    assert {row.group.step for row in trained.rows} == set(range(1, steps + 1))
    dropped = recording.rollouts(RolloutFilter(fate="no_signal"), limit=10**6)
    assert len({row.reward for row in dropped.rows[: config.batch.group_size]}) == 1
    group = recording.group(trained.rows[0].group.id)
    assert group is not None
    assert group.facts.reserved_at <= group.facts.ready_at <= group.facts.taken_at <= group.facts.trained_at
    rewards = np.array([rollout.content.reward for rollout in group.rollouts])
    advantages = np.array([rollout.advantage for rollout in group.rollouts], np.float64)
    assert np.all((advantages > 0) == (rewards > rewards.mean()))
    assert [row.advantage for row in trained.rows if row.group.id == group.id] == pytest.approx(advantages.tolist(), abs=1e-5)
    life = recording.life(group)
    assert life.checkpoint_step == steps
    (queue, inference, reward) = (
        [span for span in life.spans if span.what == what] for what in ("queue", "inference", "reward")
    )
    assert len(inference) == len(reward) == config.batch.group_size >= len(queue) > 0
    assert all(group.facts.reserved_at <= span.start <= span.stop <= group.facts.ready_at + 0.001 for span in inference)
    versions = {(span.oldest_version, span.newest_version) for span in inference}
    assert min(oldest for oldest, _ in versions) == group.content.oldest_version

    fates = recording.fates()
    assert fates is not None
    assert sum(fates.shares.values()) == pytest.approx(1.0)
    assert fates.trained == steps * config.batch.groups_per_step
    assert fates.tokens["generated"] == fates.tokens["trained"] + fates.tokens["in_flight"] + sum(
        tokens for name, tokens in fates.tokens.items() if name.startswith("dropped/")
    )

    clocks = {event.fields["offset_s"] for event in recording.events(kinds=("clock",))}
    assert clocks == {0.0}, "one machine has one clock"
    kinds = {event.kind for event in recording.events()}
    assert kinds >= {
        "start",
        "group",
        "take",
        "step",
        "checkpoint",
        "push",
        "swap",
        "engine",
        "drop",
        "process",
        "clock",
        "fates",
    }
    assert {event.fields["name"] for event in recording.events(kinds=("process",))} >= {"buffer", "learner", "worker-0"}
    staged = {member for event in recording.events(kinds=("push",)) for member in event.fields["staged"]}
    assert {event.fields["worker"] for event in recording.events(kinds=("swap",))} <= staged


def test_spans_of_worker_and_learner_join(run: tuple[Config, Rows], spans: OtlpReceiver) -> None:
    config, rows = run
    assert rows[-1]["recording/spans_dropped"] == 0
    steps = {span.attributes["async_rl.step"]: span for span in spans.named("step")}
    assert set(steps) == set(range(1, config.learner.steps + 1))
    trained = [span for span in spans.named("group") if span.attributes["async_rl.fate"] == "trained"]
    assert len(trained) == config.learner.steps * config.batch.groups_per_step
    for group in trained:
        parts = {span.name: span for span in spans.under(group)}
        assert set(parts) == {"roll out", "queue", "wait for the step", "train", "wait for the checkpoint"}
        assert {span.service for span in parts.values()} == {"async_rl.worker", "async_rl.buffer", "async_rl.learner"}
        step = steps[group.attributes["async_rl.step"]]
        assert parts["train"].links == [(step.trace, step.id)]
        assert (group.trace, group.id) in step.links
        rollouts = [span for span in spans.under(parts["roll out"]) if span.name == "rollout"]
        assert len(rollouts) == config.batch.group_size
        for rollout in rollouts:
            assert {span.name for span in spans.under(rollout)} >= {"generation", "grading"}
    pushes = {(span.trace, span.id) for span in spans.named("push")}
    assert pushes & {link for span in spans.named("generation") for link in span.links}
    assert {span.parent for span in spans.named("swap")} & {span for _, span in pushes}


def test_the_run_is_listed_with_how_it_ended_and_has_a_report(
    run: tuple[Config, Rows], capsys: pytest.CaptureFixture[str]
) -> None:
    config, rows = run
    assert dispatch(["runs", "ls", "--json", "--run.folder", str(config.run.folder)]) == 0
    (listed,) = json.loads(capsys.readouterr().out)
    assert (listed["state"], listed["step"]) == ("finished", 40)
    assert listed["reward"] == rows[-1]["reward/mean"]
    report = (config.run_folder / "report.html").read_text()
    assert f"<title>{config.run.name}</title>" in report
    assert report.count("<svg") >= 4
