"""The commands that pages show: their blocks are `sh`, or `console` where output follows them. A comment before a block says
which test does what they do, or why none does:

    <!-- run by tests/scenarios/environments/test_env_serve.py -->       a file of tests, or FILE::TEST
    <!-- not run: needs a GPU -->
    <!-- `async-rl run` not run: takes minutes -->                       only the commands that begin so

The others are typed as they stand by `tests/scenarios/site/test_page_commands.py`.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

from tests.support.repository import ROOT

_BLOCK = re.compile(
    r"(?P<comments>(?:^<!-- [^\n]* -->\n)*)^```(?P<language>sh|console)\n(?P<text>.*?)^```", re.DOTALL | re.MULTILINE
)
_MARK = re.compile(r"<!-- (?:`(?P<prefix>[^`]+)` )?(?:run by (?P<test>\S+)|not run: (?P<reason>.+)) -->")
_BEFORE = re.compile(r"(?:\w+=\S+ )*(?:exec )?(?:\S*/)?")
"""What may stand before the name of a program: variables, its folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    prefix: str
    """The beginning of the commands that it is about; empty: of all."""
    test: str
    """Who runs them; empty: nothing does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    place: str
    """Page and line of its block."""
    line: str
    mark: Mark | None

    @property
    def words(self) -> list[str]:
        """Its words, from the name of the program on."""
        return shlex.split(_BEFORE.sub("", self.line, count=1), comments=True)


def pages() -> list[str]:
    """All pages of the repository that show commands to a reader."""
    folders = ("docs", "examples", "benchmarks")
    files = [*ROOT.glob("*.md"), *(file for folder in folders for file in (ROOT / folder).rglob("*.md"))]
    return sorted(str(file.relative_to(ROOT)) for file in files)


def commands(page: str) -> list[Command]:
    text = (ROOT / page).read_text()
    found: list[Command] = []
    for block in _BLOCK.finditer(text):
        marks = [
            Mark(prefix=mark["prefix"] or "", test=mark["test"] or "")
            for mark in map(_MARK.fullmatch, block["comments"].splitlines())
            if mark
        ]
        place = f"{page}:{text.count(chr(10), 0, block.start('text'))}"
        lines = block["text"].replace("\\\n", " ").splitlines()
        if block["language"] == "console":
            lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        for line in lines:
            if line.strip() and not line.startswith("#"):
                mark = next((mark for mark in marks if line.startswith(mark.prefix)), None)
                found.append(Command(place=place, line=line, mark=mark))
    return found
