"""Versions: what is installed here fits async_rl."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from async_rl.doctor.verdict import Verdict, bad, ok
from async_rl.imports.software import own_requirements, software, unmet


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionFacts:
    installed: Mapping[str, str]
    unmet: tuple[str, ...] = ()
    """Packages that async_rl needs and that are absent, or of another version."""


def gather_versions() -> VersionFacts:
    return VersionFacts(installed=software(), unmet=tuple(unmet(own_requirements())))


def judge_versions(facts: VersionFacts) -> Iterator[Verdict]:
    if facts.unmet:
        yield bad(
            "software", f"async_rl needs {', '.join(facts.unmet)}", "install these releases, as `pip install async_rl` does"
        )
    else:
        yield ok("software", ", ".join(f"{name} {number}" for name, number in facts.installed.items()))
