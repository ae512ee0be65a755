"""A page in Chromium, which the machine has; no browser is downloaded."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from playwright.sync_api import Page, Request, expect, sync_playwright

from tests.support.waiting import PATIENCE_S

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ARGUMENTS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
]
WAIT_MS = 1000 * PATIENCE_S
"""How long something on a page may take on a busy machine."""
MUST_RUN = "TEST_BROWSER_MUST_RUN"
"""Environment variable of CI, where a missing browser is a failure."""


@dataclass(frozen=True, kw_only=True)
class OpenPage:
    page: Page
    problems: list[str] = field(default_factory=list[str])
    """Errors of the console and of scripts, and refused requests."""
    finished: list[Request] = field(default_factory=list[Request])
    """Every request that was answered."""


@contextmanager
def open_page(url: str = "", *, wide: int = 1280, high: int = 900, dark: bool = False) -> Iterator[OpenPage]:
    """A fresh profile, at `url`; it ends with the block. Skips the test where no Chromium is found."""
    if CHROMIUM is None:
        assert MUST_RUN not in os.environ, "no Chromium is found, and this machine must have one"
        pytest.skip("no Chromium is found: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        page = browser.new_page(
            viewport={"width": wide, "height": high}, color_scheme="dark" if dark else "light", reduced_motion="reduce"
        )
        page.set_default_timeout(WAIT_MS)
        expect.set_options(timeout=WAIT_MS)
        opened = OpenPage(page=page)
        page.on("console", lambda said: opened.problems.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: opened.problems.append(str(error)))
        page.on("requestfailed", lambda request: opened.problems.append(f"{request.url}: {request.failure}"))
        page.on("requestfinished", lambda request: opened.finished.append(request))
        try:
            if url:
                page.goto(url)
            yield opened
        finally:
            browser.close()
