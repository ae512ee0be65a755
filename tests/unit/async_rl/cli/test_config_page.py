"""docs/configuration_keys.md has every setting, as the code has it."""

from __future__ import annotations

import re

from async_rl.config import Config
from async_rl.config.loading import leaves
from tests.support.repository import ROOT

PAGE = ROOT / "docs" / "configuration_keys.md"


def test_every_setting_of_a_configuration_has_a_row_with_a_meaning() -> None:
    rows = dict(re.findall(r"^\| `(\S+)` \| (.*) \|$", PAGE.read_text(), flags=re.MULTILINE))
    config = Config.model_validate(
        {
            "model": {"size": {"hidden": 64, "layers": 2, "heads": 4, "experts": {"number": 4, "ffn": 32}}},
            "environments": [{"type": "counting"}],
            "learner": {"critic": {"type": "own"}, "lora": {}},
            "policies": {"judge": {"type": "openai", "url": "http://127.0.0.1:1/v1"}},
        }
    )
    for keys, _ in leaves(config.model_dump(mode="json")):
        key = ".".join(keys).replace("environments.0", "environments.N").replace("policies.judge", "policies.NAME")
        assert key in rows, key
        assert len(rows[key].rpartition(" | ")[2]) > 5, key
