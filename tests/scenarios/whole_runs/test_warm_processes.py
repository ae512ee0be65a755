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


def _answer(temporary: str, file: str) -> None:
    os.environ["TMPDIR"] = temporary
    Path(file).write_text(tempfile.gettempdir())
