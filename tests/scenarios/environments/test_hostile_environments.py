"""Two hundred episodes at once, half of them in environments that hang, raise, exit, leak and talk nonsense: the others land as
if nothing were the matter, nothing is left behind, and every cause is told once.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.repository import module_environment
from tests.support.run_processes import finished_module

CAUSES = {
    "TimeoutError": "deadline",
    "LookupError": "environment",
    "SystemExit": "environment",
    "CancelledError": "environment",
    "InvalidResult": "environment",
    "OSError": "environment",
    "IndexError": "task",
}


def work(folder: Path, *arguments: object) -> tuple[dict[str, Any], str]:
    """What the worker found, and its log."""
    environment = module_environment(PYTHONWARNINGS="ignore")
    done = finished_module(folder, "tests.scenarios.environments.hostile_worker", *arguments, environment=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


@pytest.mark.parametrize(
    ("engine", "tasks", "episodes", "deadline_s"),
    [("scripted", 64, 200, 20), pytest.param("megatron", 4, 16, 20, marks=pytest.mark.slow)],
)
def test_a_worker_lives_with_hostile_environments(
    tmp_path: Path, engine: str, tasks: int, episodes: int, deadline_s: int
) -> None:
    found, log = work(tmp_path, engine, tasks, episodes, deadline_s)
    clean, hostile = found["clean"], found["hostile"]
    rate, beside_slow = hostile["groups_per_s"], clean["groups_per_s"]
    print(f"{engine}: {rate:.1f} good groups/s beside hostile ones, {beside_slow:.1f} beside slow: {rate / beside_slow:.2f}")
    assert found["after"] == found["before"]
    for each in (clean, hostile):
        assert (each["complete"], each["reserved"], each["problems"]) == (True, 0, [])
    assert clean["failures"] == {}
    assert hostile["left_behind"] > 0
    told = Counter(re.findall(r"boundary=(\w+) .*kind=(\w+) .* times=1$", log, re.MULTILINE))
    assert set(told.values()) == {1}, "a cause was told more than once"
    if engine == "scripted":
        assert set(told) == {(boundary, kind) for kind, boundary in CAUSES.items()}
