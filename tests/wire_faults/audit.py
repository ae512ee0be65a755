"""Invariants of every run, whatever faults it had."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from tests.wire_faults.facts import Fact

_CRASH = ("terminate called", "Traceback", "Fatal Python error", "Segmentation", "Exception raised from")


def violations(facts: Sequence[Fact], published: Collection[int]) -> Iterator[str]:
    """No torn, no unpublished, no older version was ever sampled from."""
    packed = {fact.more["version"]: fact.more["digest"] for fact in facts if fact.what == "packs"}
    live, serving, began_at = -1, dict[str, int](), dict[str, int]()
    for fact in facts:
        if fact.who == "buffer":
            live = fact.more["version"]
        elif fact.what == "begins":
            serving[fact.who], began_at[fact.who] = -1, live
        elif fact.what == "serves":
            version, before = fact.more["version"], serving[fact.who]
            if version <= before:
                yield f"older: {fact.who} served version {version} after {before}"
            if fact.more["digest"] != packed.get(version):
                yield f"torn: {fact.who} served as version {version} what is not version {version}"
            if version not in published:
                yield f"unpublished: {fact.who} served version {version}, which never went live"
            if before == -1 and version < began_at[fact.who]:
                yield f"older: {fact.who} began with version {version}, {began_at[fact.who]} was live before it started"
            serving[fact.who] = version


def noise(folder: Path) -> Iterator[str]:
    """Lines of the logs that show a crash."""
    for log in sorted(folder.glob("*.log")):
        for line in log.read_text(errors="replace").splitlines():
            if any(word in line for word in _CRASH):
                yield f"{log.stem}: {line[:200]}"


def longest_pause(facts: Sequence[Fact]) -> float:
    """Between two sampled tokens of a worker that was not stopped."""
    stopped = {fact.who for fact in facts if fact.what == "struck" and fact.more["by"] == "SIGSTOP"}
    return max((fact.more["pause_s"] for fact in facts if fact.what == "serves" and fact.who not in stopped), default=0.0)
