"""Processes of tests are forks of one server, and nothing of the test that started it stays in the forks of others."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from tests.support.warm_processes import CONTEXT


def test_a_fork_finds_the_temporary_folder_of_its_own_environment(tmp_path: Path) -> None:
    answer = tmp_path / "answer"
    process = CONTEXT.Process(target=_answer, args=(str(tmp_path), str(answer)))
    process.start()
    process.join()
    assert answer.read_text() == str(tmp_path)


def test_processes_of_the_suite_and_their_forks_come_from_one_server(tmp_path: Path) -> None:
    """A process of xdist that started a server of its own would import torch and Megatron once more."""
    parents = [_parent_of_a_fork(tmp_path / str(number)) for number in range(2)]
    assert len({*parents, *([os.getppid()] if "PYTEST_XDIST_WORKER" in os.environ else [])}) == 1


def _parent_of_a_fork(answer: Path) -> int:
    process = CONTEXT.Process(target=_say_parent, args=(str(answer),))
    process.start()
    process.join()
    return int(answer.read_text())


def _say_parent(file: str) -> None:
    Path(file).write_text(str(os.getppid()))


def _answer(temporary: str, file: str) -> None:
    os.environ["TMPDIR"] = temporary
    Path(file).write_text(tempfile.gettempdir())
