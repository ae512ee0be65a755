"""deploy/kubernetes/Containerfile takes what is installed from the folder around it, and nothing else."""

from __future__ import annotations

import re
import tomllib
from pathlib import PurePath

from tests.support.repository import ROOT

CONTAINERFILE = ROOT / "deploy" / "kubernetes" / "Containerfile"


def test_only_what_is_installed_gets_into_the_image() -> None:
    """Secrets of overlays, runs and .git are in that folder, too; a layer keeps what a later one removes."""
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project, wheel = table["project"], table["tool"]["hatch"]["build"]["targets"]["wheel"]
    text = CONTAINERFILE.read_text().replace("\\\n", " ")
    assert not re.search(r"^\s*ADD\b|--mount", text, flags=re.MULTILINE | re.IGNORECASE)
    copied: set[str] = set()
    for words in re.findall(r"^\s*COPY\s+(.*)$", text, flags=re.MULTILINE | re.IGNORECASE):
        *sources, place = words.split()
        for source in sources:
            into = f"{place}{source}" if place.endswith("/") else place
            assert PurePath(into) == PurePath("/src", source), f"COPY {words}: pip would not find {source}"
            assert (ROOT / source).is_file() or not place.endswith("/"), f"COPY {words}: this copies what is in the folder"
        copied |= {*sources}
    installed = {*wheel["packages"], *wheel["force-include"], *project["license-files"], project["readme"], "pyproject.toml"}
    assert copied == installed
