"""The tree can be read before the code: every folder says what it is for, and none is a heap of files."""

import ast
import subprocess
from pathlib import Path

import pytest

from tests.support.repository import ROOT

PACKAGES = ("async_rl", "buffer", "learner", "rollout_workers")
FOLDERS = sorted({file.parent for package in PACKAGES for file in (ROOT / package).rglob("*.py")})
LISTS = {"async_rl/cli", "buffer/tools", "rollout_workers/adapters", "rollout_workers/agents"}
"""A file per verb, or per library: as many as there are."""
MOST_FILES = 14


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.relative_to(ROOT).as_posix())
def test_a_folder_is_one_subject(folder: Path):
    said = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
    assert said, "its first line says what it is for, and which file to read first"
    files = [file for file in folder.glob("*.py") if file.name not in ("__init__.py", "__main__.py")]
    assert len(files) <= MOST_FILES or folder.relative_to(ROOT).as_posix() in LISTS, "give some of them a folder"


def test_a_public_class_name_stands_once():
    found: dict[str, list[str]] = {}
    for file in sorted(file for folder in FOLDERS for file in folder.glob("*.py")):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(file.relative_to(ROOT).as_posix())
    assert {name: files for name, files in found.items() if len(files) > 1} == {}, "it does not say whose it is"


def test_no_text_below_a_definition_begins_with_of():
    lines = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
        for file in sorted(file for folder in FOLDERS for file in folder.glob("*.py"))
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if line.lstrip().startswith('"""Of ')
    ]
    assert lines == [], "begin with a verb, or with the noun that it defines"


TEST_FOLDERS = sorted({file.parent for file in (ROOT / "tests").rglob("*.py")})


@pytest.mark.parametrize("folder", TEST_FOLDERS, ids=lambda folder: folder.relative_to(ROOT).as_posix())
def test_a_folder_of_tests_is_a_package(folder: Path):
    """Without `__init__.py`, pytest would import its files by another name."""
    assert ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
    ignored = subprocess.run(["git", "check-ignore", "-q", folder / "__init__.py"], cwd=ROOT, check=False)
    assert ignored.returncode != 0, "git ignores it"


def test_only_the_shared_vocabulary_stands_loose_at_the_top():
    loose = {file.stem for file in (ROOT / "async_rl").glob("*.py")} - {"__init__"}
    assert loose == {"errors", "protocols", "replay_protocol", "testing", "types"}
