"""Recovery times: from a fault until the role works again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import quantiles


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    number: int
    p50: float
    p95: float
    longest: float

    def as_json(self) -> dict[str, float]:
        return {"times": self.number, "p50": round(self.p50, 3), "p95": round(self.p95, 3), "longest": round(self.longest, 3)}


def summed(found: Iterable[Mapping[str, Sequence[float]]]) -> dict[str, Times]:
    """Summarize the seconds that several rounds measured, by role."""
    together: dict[str, list[float]] = {}
    for each in found:
        for role, seconds in each.items():
            together.setdefault(role, []).extend(seconds)
    return {
        role: Times(number=len(each), p50=_percentile(each, 50), p95=_percentile(each, 95), longest=max(each))
        for role, each in sorted(together.items())
        if each
    }


def as_lines(found: Mapping[str, Times]) -> list[str]:
    return [
        f"recovery after {role:<18} p50 {times.p50:6.2f} s   p95 {times.p95:6.2f} s   longest {times.longest:6.2f} s   "
        f"({times.number} times)"
        for role, times in found.items()
    ]


def _percentile(values: Sequence[float], percent: int) -> float:
    return quantiles(values, n=100, method="inclusive")[percent - 1] if len(values) > 1 else values[0]
