"""`python -P -m buffer` as a process."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from async_rl.cli import env, fleet, weights
from async_rl.cli.buffer import BUFFER_VERBS, FAMILY, find
from async_rl.cli.grammar import read
from buffer.__main__ import main
from buffer.tools.verbs import ON_A_RUN, ON_FILES
from tests.support.run_processes import finished_module
from tests.support.waiting import PATIENCE_S

CONFIG = """
run: {{name: cli, folder: {folder}}}
redis: {{connect_timeout_s: {patience}}}
model: {{size: {{hidden: 8, layers: 1, heads: 1}}}}
environments: [{{type: even_digits}}]
"""
Verb = Callable[..., subprocess.CompletedProcess[str]]
DONE_HERE = (*env.MIX_VERBS, *weights.VERBS, *fleet.REDIS_VERBS, *BUFFER_VERBS)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG.format(folder=tmp_path, patience=20))
    return path


@pytest.fixture
def buffer(tmp_path: Path) -> Verb:
    return partial(finished_module, tmp_path, "buffer")


def test_serve_stats_audit_and_a_clean_end(config: Path, buffer: Verb):
    serve = subprocess.Popen([sys.executable, "-P", "-m", "buffer", "serve", "@", config], stdout=subprocess.PIPE, text=True)
    try:
        assert serve.stdout is not None
        assert "redis serves run 'cli'" in serve.stdout.readline()
        stats = buffer("stats", "@", config, "--json")
        assert json.loads(stats.stdout)["issued"] == 0
        assert "no learner holds the run" in buffer("stats", "@", config).stdout
        audit = buffer("audit", "@", config, "--json")
        assert (audit.returncode, json.loads(audit.stdout)["clean"]) == (0, True)
    finally:
        serve.send_signal(signal.SIGTERM)
        assert serve.wait(PATIENCE_S) == 0
        serve.stdout.close()


def test_the_server_dies_with_a_killed_supervisor_and_the_next_one_takes_over(config: Path):
    command = [sys.executable, "-P", "-m", "buffer", "serve", "@", config]
    for end in (signal.SIGKILL, signal.SIGTERM):
        serve = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert serve.stdout is not None
        line = serve.stdout.readline()
        assert "redis serves" in line
        serve.send_signal(end)
        serve.wait(PATIENCE_S)
        serve.stdout.close()
    with pytest.raises(ProcessLookupError):
        os.kill(int(line.rpartition("process ")[2].strip(")\n")), 0)


@pytest.mark.parametrize(
    ("words", "family"),
    [("stat @ x.yaml", "buffer"), ("stats @ missing.yaml", "buffer"), ("weights status @ missing.yaml", "weights")],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(words: str, family: str, buffer: Verb):
    result = buffer(*words.split())
    assert result.returncode == 2
    assert len(result.stderr.strip().splitlines()) == 1
    assert result.stderr.startswith(f"{family}: ")


def test_every_verb_is_listed_and_explains_itself(buffer: Verb):
    listed = buffer("--help").stdout
    assert all(verb.words.removeprefix(FAMILY) in listed and verb.help in listed for verb in BUFFER_VERBS)
    for verb in DONE_HERE:
        with contextlib.redirect_stdout(io.StringIO()) as explained:
            assert main([*verb.words.removeprefix(FAMILY).split(), "--help"]) == 0
        assert explained.getvalue().startswith(f"async-rl {verb.words}")
        assert all(f"--{option.name}" in explained.getvalue() for option in verb.options)


def test_whatever_can_be_typed_can_be_done():
    assert {verb.words for verb in DONE_HERE} - {"buffer serve"} == ON_A_RUN.keys() | ON_FILES.keys()


@pytest.mark.parametrize(
    ("words", "config", "operands", "chosen"),
    [
        ("7 @ a.yaml --json", ["@", "a.yaml"], ["7"], {"json": True}),
        ("--rollout 2 7 @a.yaml", ["@a.yaml"], ["7"], {"rollout": 2}),
        ("7 --tokens --run.name r --device cpu", ["--run.name", "r", "--device", "cpu"], ["7"], {"tokens": True}),
        ("--rollout=0 --redis.url=unix:///x 7", ["--redis.url=unix:///x"], ["7"], {"rollout": 0}),
    ],
)
def test_words_for_the_configuration_and_words_for_the_verb(words, config, operands, chosen):
    verb, rest = find(["show", *words.split()])
    line = read(verb, rest)
    assert (list(line.config), list(line.operands), line.chosen) == (config, operands, chosen)


def test_no_server_is_exit_code_6(config: Path, buffer: Verb):
    result = buffer("stats", "@", config, "--redis.url", "unix:///nowhere/redis.sock", "--redis.connect_timeout_s", "0.2")
    assert result.returncode == 6
    assert "/nowhere/redis.sock" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_run_that_does_not_exist_is_a_mistake(config: Path, buffer: Verb):
    result = buffer("audit", "@", config)
    assert result.returncode == 2
    assert "there is no run in" in result.stderr


def test_importing_the_buffer_costs_no_torch_and_no_redis():
    code = "import sys, async_rl, buffer; assert not {'torch', 'redis'} & set(sys.modules), sorted(sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False).returncode == 0
