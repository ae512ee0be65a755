"""What a person gets wrong costs one clear sentence and an exit code of its own, never a traceback."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from async_rl.cli.main import dispatch
from async_rl.config.loading import load
from async_rl.errors import BufferUnreachable, ConfigError, FailureBudgetSpent
from async_rl.launch.local import sole_run
from async_rl.telemetry import read_rows
from tests.support.repository import ROOT
from tests.support.run_processes import finished, program, read_config, write_config


def test_a_run_that_failed_before_its_first_step_begins_anew_and_long_rollouts_do_not_end_it(tmp_path: Path) -> None:
    bad = [{"type": f"{BAD}:Raises"}]
    path = write_config(
        tmp_path,
        "anew",
        batch={"bin_tokens": 6},
        learner={"steps": 2, "checkpoint_every": 2},
        worker={"failure_budget": 1},
        metrics={"console": True},
    )
    with program(tmp_path, "run", "@", path, "--environments", json.dumps(bad)) as broken:
        assert broken.exit_code() == FailureBudgetSpent.exit_code, broken.output
    with program(tmp_path, "run", "@", path) as run:
        assert run.exit_code() == 0, run.output
    folder = read_config(path).run_folder
    lines = run.output.splitlines()
    assert lines[:2] == ["run anew", f"  folder   {folder}"]
    assert "a run of this name ended before its first step with another configuration; its data is discarded" in run.output
    assert any(re.match(r"step 2/2  reward .*elapsed \d:\d\d  left 0:00$", line) for line in lines), run.output

    rows = read_rows(folder / "metrics.jsonl")
    assert sum(row.values["batch/oversize"] for row in rows) > 0, "every rollout is longer than batch.bin_tokens"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["wall_s"] > summary["training_s"] > 0


BAD = ROOT / "tests" / "support" / "bad_environments.py"
NOBODY = "redis://somebody@127.0.0.1:1/0"  # port 1 refuses


def refused(folder: Path, *arguments: object, warm: bool = True) -> tuple[int, str]:
    """The exit code, and the one line on stderr."""
    done = finished(folder, *arguments, warm=warm)
    assert not done.stdout or done.stdout.startswith("run "), "a learner first says which run it is of"
    (sentence,) = done.stderr.splitlines()
    return done.returncode, sentence


@pytest.mark.parametrize(
    ("mistake", "named"),
    [
        (["--staleness.max_agee", "3"], ["staleness.max_agee", "max_age"]),
        (["--staleness.max_age", "many"], ["staleness.max_age", "many"]),
        (["--batch.group_size", "0"], ["batch.group_size", "0"]),
        (["--model.size.heads", "5"], ["model.size", "must be a multiple of heads (5)"]),
        (["--no-such-file"], ["no-such-file"]),
    ],
    ids=lambda value: value[0] if value[0].startswith("--") else "",
)
def test_a_wrong_configuration_is_named_before_anything_starts(tmp_path: Path, mistake: list[str], named: list[str]) -> None:
    path = write_config(tmp_path, "wrong")
    with pytest.raises(ConfigError) as caught:
        dispatch(["run", "@", str(path), *mistake])
    assert all(word in str(caught.value) for word in named)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("verb", ["run", "learner", "worker", "buffer serve"])
def test_a_wrong_configuration_is_one_sentence_and_exit_code_2(tmp_path: Path, verb: str) -> None:
    path = write_config(tmp_path, "wrong")
    code, sentence = refused(tmp_path, *verb.split(), "@", path, "--learner.stepps", 3)
    assert code == ConfigError.exit_code
    assert "learner.stepps" in sentence
    assert "learner.steps" in sentence


@pytest.mark.parametrize("verb", ["run", "learner", "eval", "evaluator"])
def test_a_folder_that_cannot_be_written_in_is_one_sentence(tmp_path: Path, verb: str) -> None:
    path = write_config(tmp_path, "nowhere", evaluation={"every": 5})
    (tmp_path / "file").touch()
    code, sentence = refused(tmp_path, verb, "@", path, "--run.folder", tmp_path / "file" / "runs")
    assert code == ConfigError.exit_code
    assert f"the run's folder {tmp_path}/file/runs/nowhere cannot be written in: Not a directory" in sentence
    assert "choose another run.folder" in sentence


@pytest.mark.parametrize("depth", [101, 100_000])
@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ("{a: ", "}")])
def test_a_file_of_bottomless_values_is_one_sentence(tmp_path: Path, opening: str, closing: str, depth: int) -> None:
    path = tmp_path / "deep.yaml"
    path.write_text(f"model: {opening * depth}1{closing * depth}\n")
    with pytest.raises(ConfigError, match=r"deep.yaml.*: values are nested deeper than 100 levels"):
        load(["@", str(path)])
    with pytest.raises(ConfigError) as refused:
        load(["--model", opening * depth + "1" + closing * depth])
    assert len(str(refused.value)) < 400, "the value is not repeated whole"


@pytest.mark.parametrize("verb", ["learner", "worker", "buffer audit"])
def test_an_unreachable_redis_is_named_without_its_password(tmp_path: Path, verb: str) -> None:
    path = write_config(tmp_path, "alone", redis={"url": NOBODY, "connect_timeout_s": 0.1})
    code, sentence = refused(tmp_path, *verb.split(), "@", path, warm=verb != "learner")
    assert code == BufferUnreachable.exit_code
    assert "redis://127.0.0.1:1/0" in sentence
    assert "secret" not in sentence


def test_a_run_without_its_redis_gives_up_with_the_same_code(tmp_path: Path) -> None:
    path = write_config(tmp_path, "alone", redis={"url": NOBODY, "connect_timeout_s": 0.1})
    with program(tmp_path, "run", "@", path) as run:
        assert run.exit_code() == BufferUnreachable.exit_code
    assert "no Redis has answered at redis://127.0.0.1:1/0" in run.output
    assert not {"secret", "restarting", "Traceback"} & set(re.findall(r"\w+", run.output))


def test_a_run_that_is_going_on_is_not_started_beside_itself(tmp_path: Path) -> None:
    path = write_config(tmp_path, "once")
    with sole_run(load(["@", str(path)])):
        code, sentence = refused(tmp_path, "run", "@", path)
    assert code == ConfigError.exit_code
    assert "run 'once' is already running" in sentence
