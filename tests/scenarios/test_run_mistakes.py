"""What a person gets wrong costs one clear sentence and an exit code of its own, never a traceback."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from run_processes import ASYNC_RL, PATIENCE_S, program, read_config, write_config

from async_rl.cli import dispatch
from async_rl.config_files import load
from async_rl.errors import BufferUnreachable, ConfigError
from async_rl.local_run import sole_run
from async_rl.telemetry import read_rows


def test_rollouts_longer_than_a_row_end_no_run(tmp_path: Path) -> None:
    path = write_config(tmp_path, "long", batch={"bin_tokens": 6}, learner={"steps": 3, "checkpoint_every": 3})
    with program(tmp_path, "run", "@", path) as run:
        assert run.exit_code() == 0, run.output
    rows = read_rows(read_config(path).run_folder / "metrics.jsonl")
    assert sum(row.values["batch/oversize"] for row in rows) > 0
    assert all(row.values["batch/too_long"] == 0 for row in rows)


NOBODY = "redis://somebody@127.0.0.1:1/0"  # port 1 refuses


def refused(*arguments: object) -> tuple[int, str]:
    """The exit code, and the one line on stderr."""
    done = subprocess.run([ASYNC_RL, *map(str, arguments)], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.stdout == ""
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
    code, sentence = refused(*verb.split(), "@", path, "--learner.stepps", 3)
    assert code == ConfigError.exit_code
    assert "learner.stepps" in sentence
    assert "learner.steps" in sentence


@pytest.mark.parametrize("verb", ["learner", "worker", "buffer audit"])
def test_an_unreachable_redis_is_named_without_its_password(tmp_path: Path, verb: str) -> None:
    path = write_config(tmp_path, "alone", redis={"url": NOBODY, "connect_timeout_s": 1})
    code, sentence = refused(*verb.split(), "@", path)
    assert code == BufferUnreachable.exit_code
    assert "redis://127.0.0.1:1/0" in sentence
    assert "secret" not in sentence


def test_a_run_without_its_redis_gives_up_with_the_same_code(tmp_path: Path) -> None:
    path = write_config(tmp_path, "alone", redis={"url": NOBODY, "connect_timeout_s": 1})
    with program(tmp_path, "run", "@", path) as run:
        assert run.exit_code() == BufferUnreachable.exit_code
    assert "no Redis has answered at redis://127.0.0.1:1/0" in run.output
    assert not {"secret", "restarting", "Traceback"} & set(re.findall(r"\w+", run.output))


def test_a_run_that_is_going_on_is_not_started_beside_itself(tmp_path: Path) -> None:
    path = write_config(tmp_path, "once")
    with sole_run(load(["@", str(path)])):
        code, sentence = refused("run", "@", path)
    assert code == ConfigError.exit_code
    assert "run 'once' is going on already" in sentence
