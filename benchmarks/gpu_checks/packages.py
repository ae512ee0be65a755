"""Which packages of pyproject.toml are not installed here. Needs no package itself but `packaging`."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.requirements import Requirement

PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"


def required() -> list[Requirement]:
    """Return what an installation without extras brings."""
    return [Requirement(line) for line in tomllib.loads(PYPROJECT.read_text())["project"]["dependencies"]]


def missing() -> list[str]:
    """Return the packages that are absent, or whose version does not fit."""
    return list(_missing())


def _missing() -> Iterator[str]:
    for each in required():
        if each.marker is not None and not each.marker.evaluate():
            continue
        try:
            found = version(each.name)
        except PackageNotFoundError:
            yield each.name
            continue
        if not each.specifier.contains(found, prereleases=True):
            yield f"{each.name} {each.specifier} (there is {found})"
