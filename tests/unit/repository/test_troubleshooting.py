"""Every message that the page of troubleshooting quotes is one that the product prints."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.repository import ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
GAP = "…"
SHORTEST = 10
"""Characters of a quote without its placeholders: a shorter one would be found anywhere."""


def quotes() -> list[str]:
    """The messages in the first cells of the rows. A cell that begins with a word describes a symptom without a message."""
    cells = re.findall(r"^\| (`.*?) \|", PAGE, re.MULTILINE)
    return [quote for cell in cells for quote in re.findall(r"`([^`]+)`", cell)]


def texts(file: Path) -> Iterator[str]:
    """The literals of a Python file but for docstrings, with a placeholder for each value in them."""
    tree = ast.parse(file.read_text())
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else GAP for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield re.sub(r"%[sd]", GAP, node.value)


@pytest.fixture(scope="module")
def printed() -> list[str]:
    packages = ("async_rl", "buffer", "learner", "rollout_workers")
    found = [text for package in packages for file in sorted((ROOT / package).rglob("*.py")) for text in texts(file)]
    return [*found, (ROOT / ".ci" / "find_python").read_text().replace("${*}", GAP)]


def test_the_page_has_messages():
    assert len(quotes()) >= 60


@pytest.mark.parametrize("quote", quotes())
def test_a_quoted_message_is_one_that_is_printed(quote: str, printed: list[str]):
    parts = [part.strip() for part in quote.split(GAP)]
    assert sum(map(len, parts)) >= SHORTEST, f"{quote!r} is too short to be found"
    pattern = re.compile(".*?".join(map(re.escape, parts)))
    assert any(pattern.search(text) for text in printed), f"docs/troubleshooting.md: nothing prints {quote!r}"
