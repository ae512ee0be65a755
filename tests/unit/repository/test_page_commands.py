"""Every command that a page shows can be typed, and is run by a test or says why not."""

from __future__ import annotations

import re
import tomllib

import pytest

from async_rl.cli.grammar import find_verb, read
from async_rl.cli.main import VERBS
from async_rl.cli.train import resolve_any
from tests.support.page_commands import Command, commands, pages
from tests.support.repository import ROOT

PROGRAM = re.compile(r"^(?: {4})?(?:\$ )?(?:\w+=\S+ )*(?:\S*/)?(?:async-rl|make|pip|python|sh|srun|redis-server|export) ")
REFERENCE = "docs/verbs.md"
"""Its blocks are made from the code and show usage."""
SHOWN = [page for page in pages() if page not in (REFERENCE, "CHANGELOG.md")]
COMMANDS = [command for page in SHOWN for command in commands(page)]
OF_VERBS = [command for command in COMMANDS if command.words[0] == "async-rl"]
PLACEHOLDERS = re.compile(r"run\.yaml|mine\.yaml|copy\.yaml|NAME|my_\w+\.py")
PLAYED = ("run", "learner", "worker", "rehearse", "train sft", "train dpo", "train rm", "train distill")


def name_of(command: Command) -> str:
    return f"{command.place} {' '.join(command.words)[:60]}"


@pytest.mark.parametrize("page", SHOWN)
def test_a_block_of_commands_says_that_it_is_one(page: str) -> None:
    text = re.sub(r"^```\w+\n.*?^```", "", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)
    plain = "".join(re.findall(r"^```\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE))
    indented = "\n".join(re.findall(r"^ {4}\S.*", text, flags=re.MULTILINE))
    assert [line for line in f"{plain}\n{indented}".splitlines() if PROGRAM.match(line)] == [], "begin the block with ```sh"


@pytest.mark.parametrize("page", SHOWN)
def test_every_mark_stands_before_a_block_and_is_about_one_of_its_commands(page: str) -> None:
    written = re.findall(r"^<!-- .*(?:run by|not run).* -->$", (ROOT / page).read_text(), flags=re.MULTILINE)
    used = {(command.place, command.mark) for command in commands(page) if command.mark}
    assert len(written) == len(used)


@pytest.mark.parametrize("command", COMMANDS, ids=name_of)
def test_a_command_is_run_or_says_why_not(command: Command) -> None:
    program, *rest = command.words
    if command.mark is None:
        assert program in ("async-rl", "pip"), f"{command.place}: say who runs `{command.line}`, or why nothing does"
    if program == "pip":
        installed(rest)
    elif program == "make":
        assert re.search(rf"^.*\b{rest[0]}\b.*:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    elif program == "python":
        has_flags(rest)
    if command.mark and command.mark.test:
        file, _, name = command.mark.test.partition("::")
        source = (ROOT / file).read_text()
        assert not name or re.search(rf"^(?:async )?def {name}\(", source, flags=re.MULTILINE), f"{file} has no {name}"
        for word in [*subject(command), *([] if reads(source, command) else flags(command))]:
            assert re.search(rf"(?<![a-z]){word}(?![a-z])", source), f"{file} does not name {word!r}"


def reads(source: str, command: Command) -> bool:
    """Whether a test takes the command from its page."""
    return "commands(" in source and command.place.partition(":")[0] in source


def flags(command: Command) -> list[str]:
    """Its options. Settings (`--run.name`) are none: tests write them into a file, too."""
    return [word for word in command.words if word.startswith("--") and "." not in word]


def subject(command: Command) -> list[str]:
    """The words that a test names which does what the command does."""
    program, *rest = command.words
    if program == "async-rl":
        found = find_verb(VERBS, rest)
        return found[0].words.split() if found else []
    if program == "make":
        return rest[:1]
    if program == "python" and rest[0].endswith(".py"):
        return [rest[0].rpartition("/")[2].removesuffix(".py")]
    return []


def installed(words: list[str]) -> None:
    """What pip installs from here exists."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for word in words:
        if named := re.fullmatch(r"(?:\.|async-rl)\[(.*)\]", word):
            assert set(named[1].split(",")) <= extras.keys()
        if word.startswith("examples/"):
            assert (ROOT / word).is_file()


def has_flags(words: list[str]) -> None:
    """A program of this repository knows the flags it is given."""
    if words[0].endswith(".py"):
        folder = (ROOT / words[0]).parent
    elif words[0] == "-m" and words[1].startswith("tests."):
        folder = (ROOT / words[1].replace(".", "/")).parent
    else:
        return
    source = "".join(file.read_text() for file in folder.rglob("*.py"))
    for flag in [word for word in words if word.startswith("--")]:
        assert f'"{flag}"' in source, f"nothing in {folder.name}/ reads {flag}"


@pytest.mark.parametrize("command", OF_VERBS, ids=name_of)
def test_a_command_is_read_as_typed(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    found = find_verb(VERBS, command.words[1:])
    assert found, "there is no such verb"
    line = read(found[0], [word for word in found[1] if not word.startswith("$")])
    if found[0].words in PLAYED and not any(map(PLACEHOLDERS.search, line.words)):
        resolve_any(line.config)
