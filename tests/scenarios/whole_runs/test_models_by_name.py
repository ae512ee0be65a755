"""A model is named as on the Hugging Face Hub, fetched once, and trained; afterwards no network is needed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from async_rl.config import Config
from async_rl.config.loading import load_file
from async_rl.config.tokenizer import HuggingFaceTokenizer
from async_rl.errors import ConfigError
from async_rl.models.hf_config import read_shape
from buffer.server.embedded.programs import find_binary
from tests.support.private_server import private_server
from tests.support.recorded_run import record_run
from tests.support.repository import ROOT, module_environment
from tests.support.run_history import last_step
from tests.support.run_processes import finished
from tests.support.small_hub import COMMIT, GATED, small_hub
from tests.support.small_models import write_folder
from tests.support.waiting import PATIENCE_S

NAME = "tests/tiny"
UNREACHABLE = "http://127.0.0.1:9"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("tiny"))


def environment(home: Path, endpoint: str) -> dict[str, str]:
    return module_environment(
        HF_HOME=str(home),
        HF_ENDPOINT=endpoint,
        HF_HUB_DISABLE_PROGRESS_BARS="1",
        HF_HUB_ETAG_TIMEOUT="100",
        HF_HUB_DOWNLOAD_TIMEOUT="100",
    )


def run_file(folder: Path, name: str, model: Mapping[str, object], **sections: Mapping[str, object]) -> Path:
    path = folder / f"{name}.yaml"
    settings = {
        "run": {"name": name, "folder": str(folder / "runs")},
        "model": model,
        "environments": [{"type": "even_digits", "args": {"max_tokens": 8, "prompt_digits": 3}}],
        "sampling": {"max_tokens": 8},
        "batch": {"groups_per_step": 2, "group_size": 2, "bin_tokens": 256, "drop_no_signal": False},
        "learner": {"steps": 2},
        "worker": {"processes": 1, "kv_cache_gb": 0.25},
        "device": "cpu",
        **sections,
    }
    path.write_text(yaml.safe_dump(settings))
    return path


def test_a_model_is_trained_by_its_name_and_then_without_a_network(tmp_path: Path, folder: Path) -> None:
    home = tmp_path / "cache"
    with small_hub({NAME: folder}) as endpoint:
        path = run_file(tmp_path, "named", {"name": NAME})
        done = finished(tmp_path, "run", "@", path, environment=environment(home, endpoint))
        assert done.returncode == 0, done.stderr
    assert f"{NAME} at {COMMIT}" in done.stdout
    config = load_file(Config, tmp_path / "runs" / "named" / "config.yaml")
    assert (config.model.name, config.model.revision) == (NAME, COMMIT)
    assert isinstance(config.tokenizer, HuggingFaceTokenizer)
    assert config.model.place == config.tokenizer.place == home / "hub" / "models--tests--tiny" / "snapshots" / COMMIT
    assert last_step(config) == 2

    again = finished(tmp_path, "run", "@", path, "--learner.steps", 3, environment=environment(home, UNREACHABLE))
    assert again.returncode == 0, again.stderr
    assert last_step(config) == 3


def test_a_model_in_the_hub_and_its_folder_are_the_same_to_a_fleet(tmp_path: Path, folder: Path) -> None:
    """So a learner may name the model, and a worker without a network its folder."""
    with small_hub({NAME: folder}) as endpoint:
        facts = [
            read_facts(run_file(tmp_path, "fleet", model), environment(tmp_path / "cache", endpoint))
            for model in ({"name": NAME}, {"name": NAME, "revision": COMMIT}, {"name": NAME, "folder": str(folder)})
        ]
    assert facts[0] == facts[1] == facts[2]
    assert "no config.json" not in facts[0]


def read_facts(path: Path, environment: Mapping[str, str]) -> str:
    return python(f"from async_rl.config.loading import load; print(load(['@', {str(path)!r}]).fleet_facts)", environment)


def python(code: str, environment: Mapping[str, str]) -> str:
    """What a process prints: the library reads its environment when it is imported."""
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=True
    ).stdout


MODELS_OF_A_MACHINE = """
import json, sys
from async_rl.config.loading import load

config = load(["@", {path!r}])
models = (config.model, config.tokenizer, config.learner.reference, config.learner.teacher, config.policies["judge"])
print(json.dumps([str(model.folder) for model in models]))
"""


def test_another_machine_of_a_fleet_fetches_what_the_launching_one_has(tmp_path: Path, folder: Path) -> None:
    named, given = {"name": NAME}, {"name": NAME, "folder": str(folder)}
    others = {"learner": {"reference": named, "teacher": given}, "policies": {"judge": {"type": "hf", **named}}}
    with small_hub({NAME: folder}) as endpoint:
        path = run_file(tmp_path, "fleet", named, redis={"url": "redis://127.0.0.1:1"}, **others)
        launched = finished(
            tmp_path, "launch", "slurm", "@", path, "--dry-run", environment=environment(tmp_path / "launching", endpoint)
        )
        assert launched.returncode == 0, launched.stderr
        written = tmp_path / "runs" / "fleet" / "config.yaml"
        config = load_file(Config, written)
        assert (config.model.name, config.model.revision, config.model.folder) == (NAME, COMMIT, None)
        code = MODELS_OF_A_MACHINE.format(path=str(written))
        found = json.loads(python(code, environment(tmp_path / "another", endpoint)))
    cached = str(tmp_path / "another" / "hub" / "models--tests--tiny" / "snapshots" / COMMIT)
    assert found == [cached, cached, cached, str(folder), cached], "a folder that was given is the same everywhere"
    offline = finished(tmp_path, "worker", "@", written, environment=environment(tmp_path / "offline", UNREACHABLE))
    assert offline.returncode == ConfigError.exit_code
    assert (
        f"run `hf download {NAME} --revision {COMMIT}` where there is a network and bring the cache (HF_HOME)" in offline.stderr
    )


VERBS = (
    ("fleet", "ls"),
    ("fleet", "drain", "worker-0"),
    ("fleet", "stop"),
    ("buffer", "stats"),
    ("buffer", "limits", "staleness.max_age=1"),
    ("env", "ls"),
    ("env", "attach", "counting", "--unchecked"),
    ("weights", "status"),
    ("audit",),
    ("trace",),
    ("checkpoints", "ls"),
    ("doctor",),
)


def test_commands_that_need_no_model_fetch_none(tmp_path: Path, folder: Path) -> None:
    home, said = tmp_path / "cache", dict[str, Any]()
    with small_hub({NAME: folder}) as endpoint, private_server(find_binary()) as url:
        path = run_file(tmp_path, "asked", {"name": NAME}, redis={"url": url})
        for verb in VERBS:
            done = finished(tmp_path, *verb, "@", path, environment=environment(home, endpoint))
            said[" ".join(verb)] = (done.returncode, done.stderr, [str(found) for found in home.rglob("*")])
    assert not {verb: found for verb, (_, _, found) in said.items() if found}
    assert {verb for verb, (code, _, _) in said.items() if code == 0} >= {"buffer stats", "env ls", "doctor"}, said


TEXTS = """
from pathlib import Path
from async_rl.config.loading import load_unfetched
from async_rl.recording import Recording
from async_rl.view.recorded.rollouts import RolloutBrowser
from buffer.tools.tokens import tokenizer_of

config = load_unfetched(["@", {path!r}])
shown = RolloutBrowser(Recording(config.run_folder), config).tokens("t000000007/1", 0, 0)
print(tokenizer_of(config) is not None, shown["has_text"])
"""


def test_tokens_of_a_model_by_name_are_shown_as_text_without_its_weights(tmp_path: Path, folder: Path) -> None:
    path, home = run_file(tmp_path, "shown", {"name": NAME}), tmp_path / "cache"
    record_run(tmp_path / "runs" / "shown", 8)
    code = TEXTS.format(path=str(path))
    assert python(code, environment(home, UNREACHABLE)) == "False False\n"
    with small_hub({NAME: folder}) as endpoint:
        assert python(code, environment(home, endpoint)) == "True True\n"
    assert [*home.rglob("tokenizer.json")]
    assert not [*home.rglob("*.safetensors")]


@pytest.mark.parametrize(
    ("model", "is_reached", "said"),
    [
        ({"name": "tests/unknown"}, True, "the Hub has no model tests/unknown, or it is private: then log in"),
        ({"name": GATED}, True, f"{GATED} is gated: accept its conditions"),
        ({"name": NAME, "revision": "old"}, True, f"{NAME} has no revision 'old' on the Hub"),
        ({"name": "a name"}, True, "'a name' is no name of a model on the Hub, such as Qwen/Qwen3-0.6B"),
        ({"name": NAME}, False, f"{NAME} is not in the Hub's cache and cannot be fetched: run `hf download {NAME}` where"),
        ({"name": NAME, "revision": "v1"}, False, f"run `hf download {NAME} --revision v1` where"),
        ({"revision": "v1"}, True, "revision belongs to a name on the Hub"),
    ],
)
def test_a_name_that_leads_nowhere_is_one_sentence_with_the_way_out(
    tmp_path: Path, folder: Path, model: dict[str, str], is_reached: bool, said: str
) -> None:
    with small_hub({NAME: folder}) as endpoint:
        path = run_file(tmp_path, "lost", model)
        done = finished(
            tmp_path, "run", "@", path, environment=environment(tmp_path / "cache", endpoint if is_reached else UNREACHABLE)
        )
    assert done.returncode == ConfigError.exit_code
    assert said in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert not (tmp_path / "runs").exists(), "nothing is begun"


def test_a_name_that_is_given_as_a_folder_is_told_where_it_belongs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file or directory; a model of the Hugging Face Hub is given by its `name`"):
        read_shape(tmp_path / "Qwen" / "Qwen3-0.6B")


def test_a_check_fetches_no_weights_and_needs_no_network(tmp_path: Path, folder: Path) -> None:
    path, home = run_file(tmp_path, "checked", {"name": NAME}), tmp_path / "cache"
    done = finished(tmp_path, "config", "check", "@", path, environment=environment(home, UNREACHABLE))
    assert done.returncode == 0, done.stderr
    assert f"not checked  {NAME} is not in the Hub's cache" in done.stdout
    assert "not checked  the sizes of tests/tiny, whose files are not here" in done.stdout
    with small_hub({NAME: folder}) as endpoint:
        done = finished(tmp_path, "config", "check", "@", path, environment=environment(home, endpoint))
    assert done.returncode == 0, done.stderr
    assert "memory, GPU of the learner" in done.stdout
    assert [*home.rglob("config.json")]
    assert not [*home.rglob("*.safetensors")]
