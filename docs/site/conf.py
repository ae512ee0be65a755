"""How `make docs` builds the pages: Sphinx reads the Markdown files where they stand, so their links hold here too.

The navigation is the map, docs/README.md: a group for each heading, with the pages of its table.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).parents[2]
MAP = "docs/README"

project = "async_rl"
extensions = ["myst_parser"]
root_doc = MAP
include_patterns = ["*.md", "docs/**.md", "examples/**.md", "benchmarks/**.md"]
exclude_patterns = [".*", "build", "runs", "benchmarks/results/2*"]  # the README of results is a page, its files are not
myst_heading_anchors = 4
highlight_language = "none"  # a block without a language is a picture, a formula or output

html_theme = "furo"
html_title = "async_rl"
html_static_path = html_css_files = ["pages.css"]
html_favicon = "icon.svg"
html_extra_path = ["index.html"]  # leads to the map
html_use_index = False
html_copy_source = False


def setup(app: Sphinx) -> None:
    navigation = dict(tables_of_contents())
    app.connect("source-read", lambda _, page, source: source.append(source.pop() + navigation.get(page, "")))


def tables_of_contents() -> Iterator[tuple[str, str]]:
    """Yield the pages that have others below them, with what Sphinx needs to know of it: hidden tables of contents."""
    seen = {MAP}
    groups = re.split(r"^## ", text(MAP), flags=re.MULTILINE)
    pages = {group.partition("\n")[0]: new_links(MAP, group, seen) for group in groups}
    introduction, *captions = pages
    yield MAP, toctree(pages[introduction]) + "".join(toctree(pages[caption], caption) for caption in captions)
    for page in sorted(page for page in seen - {MAP} if page.endswith("README")):
        yield page, toctree(new_links(page, text(page), seen))


def text(page: str) -> str:
    return (ROOT / f"{page}.md").read_text()


def new_links(page: str, text: str, seen: set[str]) -> list[str]:
    """The pages that a text of a page links to, in their order, without those that were seen."""
    folder = posixpath.dirname(page)
    links = re.findall(r"\]\(([^)#:\s]+)\.md[)#]", text)
    pages = dict.fromkeys(posixpath.normpath(posixpath.join(folder, link)) for link in links)
    new = [page for page in pages if page not in seen]
    seen.update(new)
    return new


def toctree(pages: list[str], caption: str | None = None) -> str:
    options = [":hidden:", *([] if caption is None else [f":caption: {caption}"])]
    return "\n".join(["", "```{toctree}", *options, "", *(f"/{page}" for page in pages), "```", ""]) if pages else ""
