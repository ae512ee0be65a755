"""One line of `async-rl doctor`: what was found, whether a run can live with it, and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from async_rl.errors import UnfitMachine

Level = Literal["ok", "look", "bad"]
MIB = 1 << 20
GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    check: str
    level: Level
    """`look`: a run works, but slower or less safely than it could."""
    found: str
    advice: str = ""
    """Empty if it is ok."""

    @property
    def line(self) -> str:
        return f"{self.level:<4}  {self.check}: {self.found}{f' — {self.advice}' if self.advice else ''}"


def ok(check: str, found: str) -> Verdict:
    return Verdict(check=check, level="ok", found=found)


def look(check: str, found: str, advice: str) -> Verdict:
    return Verdict(check=check, level="look", found=found, advice=advice)


def bad(check: str, found: str, advice: str) -> Verdict:
    return Verdict(check=check, level="bad", found=found, advice=advice)


def as_document(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    return {"fit": all(each.level != "bad" for each in verdicts), "checks": [asdict(each) for each in verdicts]}


def refuse_unfit(verdicts: Sequence[Verdict]) -> None:
    """Raise UnfitMachine if something is bad."""
    if found := [each.check for each in verdicts if each.level == "bad"]:
        raise UnfitMachine(f"{len(found)} {'check is' if len(found) == 1 else 'checks are'} bad: {', '.join(found)}")


def in_size(count: float) -> str:
    """MiB below one GiB."""
    return f"{count / MIB:.0f} MiB" if count < GIB else f"{count / GIB:.1f} GiB"
