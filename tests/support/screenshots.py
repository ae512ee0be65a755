"""`make screenshots`: pictures of every page of `async-rl view --demo`, each below 150 kB."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page

from tests.support.browser import open_page
from tests.support.view_client import viewed

PAGES = ("overview", "staleness", "learner", "fleet", "rollouts", "compare", "config")
DARK = {"learner"}
MOST_BYTES = 150_000
HIGH, COLOURS = 800, 255


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary, viewed(Path(temporary), "--demo", warm=False) as view:
        for name in PAGES:
            with open_page(view.url, wide=1100, high=HIGH, dark=name in DARK) as opened:
                opened.page.wait_for_selector("canvas")
                opened.page.click(f"#pages a[data-page={name}]")
                if name == "compare":
                    opened.page.get_by_label("demo-before").check()
                    opened.page.locator(".chart", has_text="demo-before").first.wait_for()
                opened.page.locator("main canvas, main td").first.wait_for()
                opened.page.wait_for_load_state("networkidle")
                take(opened.page, folder / f"{name}.png")
        with open_page(f"{view.url}#/rollouts?fate=trained&order=worst", wide=1100, high=HIGH) as opened:
            opened.page.locator("table.list a").first.click()
            opened.page.locator(".token-row .token").nth(9).click()
            take(opened.page, folder / "rollout.png")
            opened.page.locator("a", has_text="group side by side").click()
            opened.page.locator(".comparison").scroll_into_view_if_needed()
            take(opened.page, folder / "siblings.png")


def take(page: Page, path: Path) -> None:
    page.screenshot(path=path)
    Image.open(path).convert("RGB").quantize(COLOURS, method=Image.Quantize.MAXCOVERAGE).save(path, optimize=True)
    size = path.stat().st_size
    assert size < MOST_BYTES, f"{path.name} has {size} bytes"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
