"""Versions of what is installed here."""

from __future__ import annotations

import importlib
import platform
import re
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from packaging.requirements import Requirement

from async_rl import __version__

COMPUTES = ("torch", "megatron-core", "transformers")
"""Packages whose version decides which numbers a model computes and which tokens it reads."""
ABSENT = "absent"


def version_of(package: str) -> str:
    """The version of a package that is installed, or only lies on the path."""
    try:
        return version(package)
    except PackageNotFoundError:
        pass
    try:
        return str(getattr(importlib.import_module(package.replace("-", "_")), "__version__", "without a version"))
    except ImportError:
        return ABSENT


def software() -> dict[str, str]:
    """The versions that should be the same on all machines of a run."""
    return {"async_rl": __version__, "python": platform.python_version(), **{name: version_of(name) for name in COMPUTES}}


def nvidia_driver(about: Path = Path("/proc/driver/nvidia/version")) -> str:
    """The version of the NVIDIA driver; empty if there is none."""
    try:
        found = re.search(r"\b\d+\.\d+(\.\d+)?\b", about.read_text())
    except OSError:
        return ""
    return found[0] if found is not None else "of an unknown version"


def own_requirements() -> list[Requirement]:
    """What async_rl needs without extras; nothing where it is used without being installed."""
    try:
        found = [Requirement(line) for line in requires("async_rl") or ()]
    except PackageNotFoundError:
        return []
    return [each for each in found if each.marker is None or "extra" not in str(each.marker)]


def unmet(requirements: Iterable[Requirement]) -> Iterator[str]:
    """Yield the packages that are absent, or whose version does not fit."""
    for each in requirements:
        if each.marker is not None and not each.marker.evaluate():
            continue
        try:
            found = version(each.name)
        except PackageNotFoundError:
            yield each.name
            continue
        if not each.specifier.contains(found, prereleases=True):
            yield f"{each.name} {each.specifier} (there is {found})"
