"""The site is built without a warning, and is whole without a network: search, pictures, both colour schemes, wide blocks."""

from __future__ import annotations

import functools
import http.server
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.browser import OpenPage, open_page
from tests.support.made_once import made_once
from tests.support.repository import ROOT
from tests.support.waiting import PATIENCE_S

NARROW = 390
PAGES = ("README", "CONTRIBUTING", "docs/configuration_keys", "docs/weights", "docs/python_api", "docs/studies/age")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(tmp_path_factory, "site", build)


def build(folder: Path) -> None:
    """Build it as the Makefile does, in another folder."""
    (command,) = [line for line in (ROOT / "Makefile").read_text().splitlines() if " -m sphinx " in line]
    words = shlex.split(command.partition(" -m ")[2].replace("build/", f"{folder}/"))
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def served(folder: Path) -> Iterator[str]:
    handler = functools.partial(QuietHandler, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_a_browser_reads_and_searches_the_site(site: Path):
    with served(site / "docs") as address:
        with open_page(f"{address}/") as opened:
            opened.page.wait_for_url("**/docs/README.html")
            navigation_follows_the_map(opened)
            search_finds(opened, "quarantine", page="Glossary", text="payloads that failed validation")
            search_finds(opened, "learner.max_bad_steps", page="Every setting", text="")
            blocks_and_tables_fit(opened, address)
            stays_there(opened, address)
        with open_page(f"{address}/README.html", wide=NARROW, dark=True) as opened:
            assert brightness(opened) < 60
            blocks_and_tables_fit(opened, address)
            stays_there(opened, address)


def test_search_works_from_the_disk(site: Path):
    with open_page((site / "docs" / "index.html").as_uri()) as opened:
        opened.page.wait_for_url("**/docs/README.html")
        assert brightness(opened) > 200
        opened.page.get_by_role("textbox", name="Search").fill("quarantine")
        opened.page.keyboard.press("Enter")
        opened.page.locator("#search-results li a", has_text="buffer").first.wait_for()


def navigation_follows_the_map(opened: OpenPage) -> None:
    questions = opened.page.locator("article h2").all_inner_texts()
    captions = opened.page.locator(".sidebar-tree .caption").all_inner_texts()
    assert len(captions) > 5
    assert [text.upper() for text in captions] == [text.strip("¶# \n").upper() for text in questions]
    assert opened.page.locator(".sidebar-tree a", has_text="Decisions").count() == 1


def search_finds(opened: OpenPage, word: str, *, page: str, text: str) -> None:
    opened.page.get_by_role("textbox", name="Search").fill(word)
    opened.page.keyboard.press("Enter")
    opened.page.locator(".search-summary", has_text="Search finished").wait_for()  # each result moves others
    opened.page.locator("#search-results li", has_text=page).filter(has_text=text).locator("a").first.click()
    opened.page.locator("article h1", has_text=page).wait_for()
    opened.page.locator(".highlighted").first.wait_for()


def blocks_and_tables_fit(opened: OpenPage, address: str) -> None:
    """What is wider than the page scrolls by itself: the page never does."""
    for page in PAGES:
        opened.page.goto(f"{address}/{page}.html")
        wide = opened.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert wide <= 0, f"{page} is {wide} pixels wider than its window"
        broken = opened.page.evaluate("[...document.images].filter(image => !image.complete || !image.naturalWidth).length")
        assert broken == 0, f"{page}: {broken} pictures are not there"


def brightness(opened: OpenPage) -> float:
    colour = opened.page.evaluate("getComputedStyle(document.body).backgroundColor")
    return sum(map(int, colour.strip("rgb()").split(",")[:3])) / 3


def stays_there(opened: OpenPage, address: str) -> None:
    left = "net::ERR_ABORTED"  # a page of results was left while it fetched what they say
    assert [problem for problem in opened.problems if not (problem.startswith(address) and left in problem)] == []
    assert all(request.url.startswith((address, "data:")) for request in opened.finished)
