"""Which settings differ from their defaults, also where a file writes all of them out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from async_rl.config import Config
from async_rl.config.loading import leaves, to_show, to_yaml
from async_rl.view.changed_keys import changed_keys
from async_rl.view.opened_run import open_folder

GIVEN = {
    "model": {"size": {"hidden": 64, "layers": 2, "heads": 4}},
    "tokenizer": {"type": "characters", "alphabet": "01"},
    "environments": [{"type": "counting", "args": {"length": 12}}],
}
REQUIRED = {
    *("model.size.hidden", "model.size.layers", "model.size.heads", "tokenizer.alphabet"),
    *("environments.0.type", "environments.0.args.length"),
}


@pytest.mark.parametrize(
    ("more", "keys"),
    [
        ({}, set[str]()),
        ({"staleness": {"max_age": 3}, "worker": {"groups_in_flight": 16}}, {"staleness.max_age"}),
        ({"evaluation": {"every": 5, "environments": ["counting"]}}, {"evaluation.every", "evaluation.environments"}),
        ({"learner": {"optimizer": {"learning_rate": 1e-6}}}, set[str]()),
    ],
)
def test_only_what_differs_from_its_default_is_changed(more: dict[str, Any], keys: set[str]):
    assert changed_keys(Config.model_validate({**GIVEN, **more})) == REQUIRED | keys


def test_a_run_whose_file_names_every_key_hides_its_defaults(tmp_path: Path):
    (tmp_path / "config.yaml").write_text(to_yaml(Config.model_validate({**GIVEN, "run": {"name": "x"}})))
    opened = open_folder(tmp_path)
    assert "default" not in set(opened.origins.values())
    assert opened.changed >= REQUIRED
    assert "worker.groups_in_flight" not in opened.changed
    assert opened.changed <= {".".join(key) for key, _ in leaves(to_show(opened.config))}
