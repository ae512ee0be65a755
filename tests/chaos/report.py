"""The figures of a run: deaths, failpoints reached, violations, recovery times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.chaos.children import POINTS, points_of
from tests.chaos.outcome import Outcome
from tests.chaos.plan import Plan
from tests.chaos.recovery import Times, as_lines, summed


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    plan: Plan
    outcome: Outcome
    violations: dict[str, list[str]]
    points: str
    """Content of the failpoints' log."""

    @property
    def is_violated(self) -> bool:
        return any(self.violations.values())

    @property
    def sentence(self) -> str:
        settings, outcome = self.plan.settings, self.outcome
        said = "; ".join(f"{kind}: {each}" for kind, sentences in self.violations.items() for each in sentences)
        return (
            f"{outcome.kills} kills in {outcome.seconds:.0f} s, {outcome.acts} acts ({settings.selector}, "
            f"max_age {settings.max_age}, {settings.groups_per_step} groups, {settings.max_uses} uses): "
            f"{said if said else 'clean'}"
        )


def table(rounds: Sequence[Round], *, command: str) -> str:
    lines = ["", f"{'victim':<10} {'how':<14} {'in state':<26} times"]
    for (victim, how, state), times in sorted(_deaths(rounds).items()):
        lines.append(f"{victim:<10} {how:<14} {state:<26} {times}")
    passed, died = _points(rounds)
    expected = _expected()
    hit = [f"{name} {died[name]}" for name in expected if died[name]]
    lines += ["", f"failpoints: died at {len(hit)} of {len(expected)}: {', '.join(hit)}"]
    lines += [f"  passed only: {', '.join(name for name in expected if passed[name] and not died[name])}"]
    lines += [f"  never reached: {', '.join(name for name in expected if not passed[name])}", ""]
    lines += as_lines(_recovery(rounds))
    kills, pauses = sum(each.outcome.kills for each in rounds), sum(each.outcome.pauses for each in rounds)
    seconds = sum(each.outcome.seconds for each in rounds)
    lines += ["", f"{kills} kills and {pauses} pauses in {seconds:.0f} s, {len(rounds)} rounds"]
    for kind, number in _violated(rounds).items():
        lines.append(f"{kind:<14} {number}")
    for each in rounds:
        for sentences in each.violations.values():
            lines += [f"VIOLATION in round {each.plan.round}: {sentence}" for sentence in sentences]
    return "\n".join([*lines, f"again: {command}"])


def as_json(rounds: Sequence[Round], *, command: str, server: str) -> dict[str, Any]:
    passed, died = _points(rounds)
    expected = _expected()
    return {
        "command": command,
        "server": server,
        "kills": sum(each.outcome.kills for each in rounds),
        "pauses": sum(each.outcome.pauses for each in rounds),
        "seconds": round(sum(each.outcome.seconds for each in rounds), 1),
        "violations": _violated(rounds),
        "deaths": [
            {"victim": victim, "how": how, "state": state, "times": times}
            for (victim, how, state), times in sorted(_deaths(rounds).items())
        ],
        "failpoints": {name: {"passed": passed[name], "died": died[name]} for name in expected},
        "recovery_s": {role: times.as_json() for role, times in _recovery(rounds).items()},
        "rounds": [
            {**each.plan.as_json(), "kills": each.outcome.kills, "acts": each.outcome.acts, "violations": each.violations}
            for each in rounds
        ],
    }


def _deaths(rounds: Iterable[Round]) -> Counter[tuple[str, str, str]]:
    return Counter((d.role.partition("-")[0], d.how, d.state) for each in rounds for d in each.outcome.deaths)


def _expected() -> list[str]:
    """Return the failpoints of all roles of the harness."""
    return sorted({name for role in POINTS for name in points_of(role)})


def _points(rounds: Iterable[Round]) -> tuple[Counter[str], Counter[str]]:
    """Return failpoint -> number of lives that passed it, and that ended there."""
    rows = [line.split() for each in rounds for line in each.points.splitlines()]
    return (
        Counter(name for what, name, _ in rows if what == "passed"),
        Counter(name for what, name, _ in rows if what == "died"),
    )


def _recovery(rounds: Iterable[Round]) -> dict[str, Times]:
    """Summarize the times from a death to the next act of the same role."""
    return summed(each.outcome.recovery_s for each in rounds)


def _violated(rounds: Iterable[Round]) -> dict[str, int]:
    numbers: Counter[str] = Counter()
    for each in rounds:
        numbers.update({kind: len(sentences) for kind, sentences in each.violations.items()})
    return dict(numbers)
