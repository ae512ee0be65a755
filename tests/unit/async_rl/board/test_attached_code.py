"""Which code may be attached to a run: what its file names, what is shipped, and what `environments_from` allows."""

from __future__ import annotations

from typing import Any

import pytest

from async_rl.board.attached_code import HARMLESS, refuse_foreign_code
from async_rl.config import Config
from async_rl.config.rollout import EnvironmentConfig
from async_rl.errors import ConfigError
from rollout_workers.registry import BUILT_IN

CONFIGURED = [
    EnvironmentConfig(type="theirs.games:Chess"),
    EnvironmentConfig(type="dataset", args={"path": "a.jsonl", "scoring": "theirs.scores:exact"}),
    EnvironmentConfig(type="gymnasium", args={"id": "FrozenLake-v1"}),
]
ALLOWED = ["lab", "plug_in", "/srv/environments/", "/srv/one.py"]

MAY: list[tuple[str, dict[str, Any]]] = [
    ("counting", {"length": 3}),
    ("theirs.games:Chess", {"opening": "e4"}),
    ("dataset", {"scoring": "theirs.scores:exact", "system": "Say: yes or no"}),
    ("dataset", {"scoring": "http://127.0.0.1:80"}),
    ("dataset", {"path": "openai/gsm8k", "split": "train[:95%]", "template": "Solve: {{ question }}"}),
    ("multi_task", {"environments": [{"type": "counting"}, {"type": "theirs.games:Chess"}]}),
    ("remote", {"url": "https://there:7100/path:x"}),
    ("gymnasium", {"id": "Taxi-v3"}),
    ("lab:Class", {}),
    ("lab.deep.module:Class", {"other": ["lab.scores:one"]}),
    ("plug_in", {}),
    ("/srv/environments/deep/file.py:Class", {}),
    ("/srv/one.py:Class", {}),
]
MAY_NOT: list[tuple[str, dict[str, Any]]] = [
    ("subprocess:Popen", {"args": ["touch", "x"]}),
    ("theirs.games:Other", {}),
    ("theirs.scores.exact:x", {}),
    ("another_plug_in", {}),
    ("verifiers", {"taskset": "anything"}),
    ("laboratory:Class", {}),
    ("/srv/environments/../evil.py:Class", {}),
    ("/srv/environments.py:Class", {}),
    ("/srv/one.py.py:Class", {}),
    ("dataset", {"curriculum": "os:getcwd"}),
    ("dataset", {"scoring": "a folder/x.py:f"}),
    ("gymnasium", {"id": "os:Taxi-v3"}),
    ("theirs.games:Chess", {"deep": [{"er": "os:system"}]}),
    ("multi_task", {"environments": [{"type": "counting"}, {"type": "subprocess:Popen"}]}),
    ("multi_task", {"environments": [{"type": "multi_task", "args": {"environments": [{"type": "another_plug_in"}]}}]}),
]


@pytest.mark.parametrize(("kind", "args"), MAY)
def test_what_the_file_names_what_is_shipped_and_what_is_allowed_may_come(kind: str, args: dict[str, Any]):
    refuse_foreign_code(EnvironmentConfig(type=kind, args=args), CONFIGURED, ALLOWED)


@pytest.mark.parametrize(("kind", "args"), MAY_NOT)
def test_everything_else_is_refused_in_one_sentence(kind: str, args: dict[str, Any]):
    with pytest.raises(
        ConfigError, match=r"may not be attached: .* `environments_from: \[.+\]` in that file allows it"
    ) as refusal:
        refuse_foreign_code(EnvironmentConfig(type=kind, args=args), CONFIGURED, ALLOWED)
    assert "\n" not in str(refusal.value)


def test_every_shipped_environment_was_decided_on():
    assert set(BUILT_IN) - HARMLESS == {"gymnasium", "verifiers"}, "does the new one load code that its arguments name?"
    assert set(BUILT_IN) >= HARMLESS


def test_a_run_s_own_copy_of_its_configuration_allows_the_same_places():
    config = Config.model_validate(
        {
            "model": {"size": {"hidden": 8, "layers": 1, "heads": 1}},
            "environments": [{"type": "counting"}],
            "environments_from": ["lab", "here/", "one.py"],
        }
    ).seen_from_anywhere()
    lab, folder, file = config.environments_from
    assert lab == "lab"
    assert folder.startswith("/")
    assert folder.endswith("/here")
    assert file.endswith("/one.py")
