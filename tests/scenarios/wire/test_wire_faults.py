"""Whatever is killed, stopped or cut off, no torn or older version is ever served. `make wire-faults` does 100 of each."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.wire_faults.run import main

QUICK = {
    "gloo": ("worker SIGKILL", "worker SIGSTOP", "worker SIGTERM", "learner SIGKILL", "learner SIGTERM", "stranger"),
    "memory": ("worker SIGKILL", "learner SIGKILL"),
}
"""By what the weights go over. In memory it is a process killed at any moment that could leave something behind."""
CUT = "one-way cut"
"""Needs a network of its own, so it is skipped where the system does not permit one."""


def _play(report: Path, *arguments: object) -> dict[str, Any]:
    main(["--report", str(report), *map(str, arguments)])
    played = json.loads(report.read_text())
    assert played["violations"] == []  # how long it took is for a quiet machine to judge
    return played


@pytest.mark.parametrize("over", QUICK)
def test_a_fault_affects_only_its_own_process(tmp_path: Path, over: str) -> None:
    """Each fault strikes once, at a moment of its own: the seed is printed with the command."""
    chosen = [word for fault in (*QUICK[over], *([CUT] if over == "gloo" else [])) for word in ("--fault", fault)]
    played = _play(tmp_path / "report.json", "--trials", 1, "--over", over, "--seed", random.randrange(10**6), *chosen)
    assert {trial["fault"] for trial in played["trials"]} >= set(QUICK[over])


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
def test_a_hundred_of_each(tmp_path: Path) -> None:
    played = _play(tmp_path / "report.json", "--trials", 100)
    assert all(fault["trials"] == 100 for fault in played["faults"])
