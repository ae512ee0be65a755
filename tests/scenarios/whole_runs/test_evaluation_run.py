"""Evaluations of real models: beside a run that trains, of what it leaves behind, and of a Hugging Face folder."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from async_rl.cli.main import dispatch
from async_rl.config import Config
from async_rl.errors import ConfigError
from async_rl.telemetry import read_rows
from rollout_workers.evaluation.__main__ import evaluate_once
from rollout_workers.evaluation.subject import LiveRun, find_subject
from tests.support.run_history import last_step
from tests.support.run_processes import program, read_config, write_config
from tests.support.small_models import write_folder
from tests.support.waiting import until

STEPS, EVERY = 40, 20


def evaluated(config: Config, pattern: str) -> list[dict[str, Any]]:
    """The rows of the one evaluation whose file is called so."""
    (path,) = (config.run_folder / "eval").glob(f"{pattern}.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def greedy_answers(rows: list[dict[str, Any]]) -> list[str]:
    return [row["greedy"]["said"] for row in rows[1:]]


def test_training_goes_on_while_a_run_is_evaluated(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = write_config(tmp_path, "live", learner={"steps": 100_000}, evaluation={"tasks": 6, "samples": 2, "k": [1, 2]})
    config = read_config(path)
    with program(tmp_path, "run", "@", path) as run:
        until(lambda: last_step(config) >= 1, "the run trains", while_alive=run)

        def trains_during_an_evaluation() -> bool:
            before = last_step(config)
            asyncio.run(evaluate_once(LiveRun(), config))
            return last_step(config) > before

        assert any(trains_during_an_evaluation() for _ in range(5)), "training waits for evaluations"
    assert "| environment | tasks | mean@2 | pass@1 | pass@2 | greedy |" in capfd.readouterr().out


def test_a_run_is_evaluated_on_schedule_and_afterwards(tmp_path: Path) -> None:
    path = write_config(
        tmp_path,
        "watched",
        learner={"steps": STEPS, "checkpoint_every": STEPS},
        evaluation={"every": EVERY, "tasks": 6, "samples": 2, "k": [1, 2]},
        metrics={"console": True},
    )
    config = read_config(path)
    with program(tmp_path, "run", "@", path) as run:
        assert run.exit_code() == 0, run.output

    summary = json.loads((config.run_folder / "summary.json").read_text())
    steps = [each["step"] for each in summary["evaluations"]]
    assert steps[-1] == STEPS, "the learner waits for the last one; an evaluator that comes late misses earlier ones"
    for step in steps:
        said = f"evaluation of step {step}: Paced  mean@2 "
        assert any(line.startswith(said) for line in run.output.splitlines()), run.output
    assert summary["evaluations"][-1]["environments"]["Paced"]["tasks"] == 6

    last = evaluated(config, f"step-{STEPS:08d}-version-*")
    assert last[0]["step"] == STEPS
    measured = {
        name: value
        for row in read_rows(config.run_folder / "metrics.jsonl")
        if row.values.get("eval/step") == STEPS
        for name, value in row.values.items()
    }
    assert measured["eval/Paced/mean@2"] == last[0]["environments"]["Paced"]["mean@2"]["mean"]
    assert measured["eval/version"] == last[0]["version"]

    asyncio.run(evaluate_once(find_subject("", config), config))
    saved = evaluated(config, "checkpoint-*")
    assert (saved[0]["step"], saved[0]["version"]) == (STEPS, last[0]["version"])
    assert greedy_answers(saved) == greedy_answers(last), "the weights that were live are those of the checkpoint"


async def test_a_folder_of_hugging_face_is_evaluated_alike_by_every_engine(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, answers = write_folder(tmp_path / "model"), list[list[str]]()
    for backend in ("megatron", "hf"):
        evaluation = {"tasks": 3, "samples": 2, "solved_at": 0.1}
        config = read_config(write_config(tmp_path, backend, evaluation=evaluation, worker={"backend": backend}))
        await evaluate_once(find_subject(str(folder), config), config)
        assert str(folder) in capfd.readouterr().out
        head, *tasks = evaluated(config, "*")
        assert head["environments"]["Paced"]["episodes"] == 9
        answers.append(greedy_answers([head, *tasks]))
    assert len(set(map(str, answers[0]))) > 1, "the model does not read its prompts"
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["eval", "a", "b"], "takes no operand .b."),
        (["evaluator"], "evaluation.every is 0"),
        (["eval", "--evaluation.k", "[9]"], "pass@9 needs as many samples"),
        (["eval", "--evaluation.environments", "[chess]"], r"the environments are \['Paced'\]"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_sentence_before_anything_is_loaded(tmp_path: Path, words: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        dispatch([*words, "@", str(write_config(tmp_path, "mistakes"))])
