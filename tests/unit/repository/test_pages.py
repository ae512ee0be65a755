"""The pages: links and paths lead somewhere, every page can be found, commands exist, and lists are complete."""

import re
import shlex
from pathlib import Path

import pytest

from async_rl import errors
from async_rl.cli.main import VERBS
from async_rl.config import Config
from async_rl.config.loading import load_with_origins
from tests.support.repository import ROOT

FOLDERS = ("async_rl", "buffer", "rollout_workers", "learner", "configs", "examples", "tests", "benchmarks", "docs", ".ci")
FILES = [*ROOT.glob("*.md"), *(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.*"))]
PAGES = [str(file.relative_to(ROOT)) for file in FILES if file.suffix == ".md"]
FOLDER = "|".join(map(re.escape, FOLDERS))
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def text_of(page: str) -> str:
    return (ROOT / page).read_text()


def without_blocks(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", without_blocks(page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(page: str) -> list[tuple[Path, str]]:
    """The file and the anchor of every link of a page that stays within the repository."""
    found: list[tuple[Path, str]] = []
    for target in LINK.findall(without_blocks(text_of(page))):
        if "://" not in target:
            file, _, anchor = target.partition("#")
            found.append(((ROOT / page).parent / file if file else ROOT / page, anchor))
    return found


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page: str):
    for file, anchor in links(page):
        assert file.exists(), f"{page}: there is no {file}"
        assert not anchor or anchor in anchors(file), f"{page}: {file.name} has no heading #{anchor}"


@pytest.mark.parametrize("page", PAGES)
def test_every_path_that_a_page_names_exists(page: str):
    for path in re.findall(rf"(?<![\w/.-])(?:{FOLDER})/(?:[\w./{{}},*-]*/|[\w./{{}},*-]*\.\w+)(?![\w/{{])", text_of(page)):
        before, brace, rest = path.partition("{")
        inside, _, after = rest.partition("}")
        for choice in inside.split(",") if brace else [""]:
            assert list(ROOT.glob(before + choice + after)), f"{page}: there is no {before + choice + after}"


def test_every_page_that_the_code_names_exists():
    for file in FILES:
        if file.suffix in (".py", ".lua", ".yaml"):
            for page in re.findall(r"\bdocs/[\w/]+\.md", file.read_text()):
                assert (ROOT / page).exists(), f"{file}: there is no {page}"


def test_every_page_is_found_from_the_map():
    seen: set[Path] = set()
    waiting = [ROOT / "docs" / "README.md"]
    while waiting:
        page = waiting.pop().resolve()
        if page not in seen and page.suffix == ".md":
            seen.add(page)
            waiting.extend(file for file, _ in links(str(page.relative_to(ROOT))))
    assert {ROOT / page for page in PAGES if page.startswith("docs/")} <= seen


def commands(page: str) -> list[str]:
    """The commands `async-rl ...` of a page's blocks, continued lines joined, without comments."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", text_of(page), re.DOTALL | re.MULTILINE)
    blocks += re.findall(r"(?:^    .*\n)+", text_of(page), re.MULTILINE)
    joined = "\n".join(blocks).replace("\\\n", " ")
    return [line.split("async-rl ", 1)[1] for line in joined.splitlines() if re.match(r"\s*(?:\S+=\S+ )*async-rl ", line)]


@pytest.mark.parametrize("page", PAGES)
def test_every_verb_that_a_page_types_exists(page: str):
    verbs = {verb.words for verb in VERBS} | {"--help", "VERB"}
    for typed in commands(page):
        words = typed.split()
        assert {" ".join(words[:length]) for length in (1, 2, 3)} & verbs, f"{page}: there is no async-rl {typed}"


@pytest.mark.parametrize("command", [line for line in commands("README.md") if line.startswith("run @ configs/")])
def test_every_run_of_the_first_page_is_a_valid_configuration(command: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    load_with_origins(shlex.split(command, comments=True)[1:])


def test_the_configuration_page_has_every_section():
    (table,) = re.findall(r"^## Sections\n(.*?)^## ", text_of("docs/configuration.md"), re.DOTALL | re.MULTILINE)
    cells = re.findall(r"^\| (`.*?`) \|", table, re.MULTILINE)
    assert sorted(name for cell in cells for name in re.findall(r"`(\w+)`", cell)) == sorted(Config.model_fields)


def test_the_environment_of_the_first_page_is_the_example():
    (block,) = re.findall(r"```python\n(.*?)```", text_of("README.md"), re.DOTALL)
    assert block == text_of("examples/my_environment.py")


def kinds() -> list[type[errors.AsyncRLError]]:
    """The kinds of errors with an exit code of their own; others end a process with 1."""
    return [kind for kind in errors.AsyncRLError.__subclasses__() if "exit_code" in vars(kind)]


def test_operations_lists_every_exit_code():
    (section,) = re.findall(r"^## Exit codes\n(.*?)^## ", text_of("docs/operations.md"), re.DOTALL | re.MULTILINE)
    listed = dict(re.findall(r"^\| (\d+) \| `(\w+)`", section, re.MULTILINE))
    assert listed == {str(kind.exit_code): kind.__name__ for kind in kinds()}


def test_the_list_in_errors_names_every_exit_code():
    listed = dict(re.findall(r"── (\w+) \((\d+)\)", errors.__doc__ or ""))
    assert listed == {kind.__name__: str(kind.exit_code) for kind in kinds()}
