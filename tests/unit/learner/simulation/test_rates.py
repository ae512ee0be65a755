"""`async-rl simulate` finds rates again in a recording that was made with them; predictions, searches, sentences."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from async_rl.config import Config
from async_rl.config.loading import load
from async_rl.errors import ConfigError
from learner.simulation.__main__ import main
from learner.simulation.bottlenecks import resources
from learner.simulation.calibration import calibrated
from learner.simulation.control_traffic import redis_share
from learner.simulation.prediction import Machines, predict, smallest_fleet, steady
from learner.simulation.rates import Rates, world_of
from learner.simulation.recorded import RecordedRun, read_run
from tests.support.page_commands import Command, commands
from tests.support.rated_run import A_TOKEN_S, BESIDE_S, SIBLINGS, TOKENS, WAITED_S, record_rates
from tests.support.repository import ROOT

QUICKSTART = ["@", str(ROOT / "configs" / "quickstart.yaml")]


@pytest.fixture(scope="module")
def config() -> Config:
    return load([*QUICKSTART, "--run.name", "recorded", "--batch.group_size", str(SIBLINGS)])


@pytest.fixture(scope="module")
def folder(config: Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    record_rates(folder, config)
    return folder


def test_a_recording_says_how_long_steps_tokens_waits_and_pushes_take(folder: Path):
    run = read_run(folder)
    rates = run.rates
    assert (run.workers, run.step_s, run.age) == (1, pytest.approx(2.0), pytest.approx(1.5))
    assert rates.learner_s == pytest.approx(1.5)
    assert rates.alone_s == pytest.approx(TOKENS * A_TOKEN_S, rel=0.05)
    assert rates.group_s == pytest.approx(TOKENS * BESIDE_S * SIBLINGS, rel=0.05)
    assert rates.latencies == pytest.approx([WAITED_S] * len(rates.latencies), abs=0.01)
    assert rates.push_s == pytest.approx(0.3)
    assert rates.dropped == pytest.approx(2 / (2 + 8))
    assert rates.tokens == TOKENS * SIBLINGS
    assert rates.group_bytes > 0


TRUE = Rates(learner_s=0.1, group_s=0.02, alone_s=0.03, sizes=(1.0,), tokens=100, group_bytes=1e6, push_workers=1)


def test_the_model_repeats_a_run_from_which_it_is_calibrated(config: Config):
    """Learner and workers share one core here, so what is seen of each is longer than its work."""
    steps = steady(world_of(config, TRUE, workers=2, cores=1), None)
    first, last = steps[0].totals, steps[-1].totals
    learner_s = (last.learner_s - first.learner_s) / (len(steps) - 1)
    seen = RecordedRun(
        config=config,
        rates=replace(TRUE, learner_s=learner_s, group_s=0.05, alone_s=0.075),
        workers=2,
        step_s=(steps[-1].ended - steps[0].ended) / (len(steps) - 1),
        age=1.0,
        engine_s=(last.computing_s - first.computing_s) / (last.computed - first.computed),
        steps=len(steps),
        groups=100,
    )
    assert learner_s > 1.3 * TRUE.learner_s
    found = calibrated(seen, cores=1)
    assert found.learner_s == pytest.approx(TRUE.learner_s, rel=0.05)
    assert (found.group_s, found.alone_s) == pytest.approx((TRUE.group_s, TRUE.alone_s), rel=0.1)


def test_the_smallest_fleet_reaches_the_rate_and_one_worker_less_does_not(config: Config):
    slow = replace(TRUE, group_s=1.0)
    found = smallest_fleet(config, slow, Machines(), steps_per_hour=3600)
    assert found is not None
    assert found.workers > 4
    assert found.steps_per_hour >= 3600
    assert predict(config, slow, Machines(), workers=found.workers - 1).steps_per_hour < 3600
    assert smallest_fleet(config, replace(slow, learner_s=1.1), Machines(), steps_per_hour=3600) is None


def test_rates_follow_the_size_of_a_batch(config: Config):
    larger = config.batch.model_copy(update={"group_size": 2 * SIBLINGS, "groups_per_step": 16})
    found = TRUE.scaled(config.batch, larger)
    assert (found.learner_s, found.group_s, found.alone_s) == (4 * TRUE.learner_s, 2 * TRUE.group_s, TRUE.alone_s)


def test_what_is_shared_fills_up(config: Config):
    machines = Machines(link_gb_s=1.0)
    heavy = replace(TRUE, weight_bytes=20e6)
    found = predict(config, heavy, machines, workers=4)
    first, *_ = resources(config, heavy, machines, found)
    assert first.name == "learner's pushes"
    assert first.full_at is not None
    assert first.full_at > 4
    redis = next(each for each in resources(config, TRUE, machines, found) if each.name == "core of Redis")
    assert redis.full_at is not None
    traffic = {"groups_per_s": found.rolled_out_per_s, "pushes_per_s": found.pushes_per_s}
    assert redis_share(redis.full_at - 1, **traffic) < 1 <= redis_share(redis.full_at, **traffic)
    memory = next(each for each in resources(config, TRUE, machines, found) if each.name == "buffer memory")
    assert memory.used == pytest.approx(found.buffer_bytes / (config.redis.max_memory_mb * 2**20))


@pytest.mark.parametrize("command", commands("docs/simulate.md"), ids=lambda command: " ".join(command.words[2:]))
def test_a_command_of_the_page_answers(
    command: Command,
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "NAME").symlink_to(folder)
    shutil.copy(folder / "config.yaml", tmp_path / "run.yaml")
    monkeypatch.chdir(tmp_path)
    _, verb, *words = command.words
    assert verb == "simulate"
    main(words)
    said = capsys.readouterr().out
    assert "what limits it first" in said
    if "--workers" in words:
        assert f"workers       {words[words.index('--workers') + 1]}\n" in said
    if "--link-gb-s" in words:
        place = words.index("--link-gb-s")
        main([*words, "--json"])
        main([*words[:place], *words[place + 2 :], "--json"])
        linked, free = map(json.loads, capsys.readouterr().out.splitlines())
        assert linked["push_s"] > free["push_s"]


ASSUMED = [*QUICKSTART, "--train-s", "0.5", "--worker-tok-s", "800", "--answer-tokens", "12"]


def test_the_verb_answers_in_words_and_in_json(folder: Path, capsys: pytest.CaptureFixture[str]):
    main(["--from", str(folder), "--workers", "3"])
    assert "workers       3" in capsys.readouterr().out
    main([*ASSUMED, "--cores", "0", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert (found["workers"], found["step_s"]) == (2, pytest.approx(0.96, rel=0.1))  # 8 x 16 x 12 tokens of two workers
    main([*ASSUMED, "--cores", "0", "--search", "3600"])
    assert "workers       2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (QUICKSTART, "--train-s is not given"),
        ([*QUICKSTART, "--from", "nowhere"], "there is no run in this folder"),
        ([*ASSUMED, "--search", "1", "--workers", "2"], "cannot be given with --workers"),
        ([*ASSUMED, "--cores", "0", "--search", "9000"], "no fleet of up to 16384 workers"),
        ([*ASSUMED, "--replay.max_uses", "2"], "set replay.max_uses to 1"),
    ],
)
def test_what_cannot_be_simulated_gets_one_sentence(words: list[str], sentence: str):
    with pytest.raises(ConfigError, match=sentence):
        main(words)


def test_a_run_without_recorded_rollouts_says_so(folder: Path, tmp_path: Path):
    for name in ("config.yaml", "metrics.jsonl"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    with pytest.raises(ConfigError, match=r"recording\.rollouts_mb"):
        read_run(tmp_path)
