"""The figures of a run: how long each fault kept versions from going live, and what was violated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tests.wire_faults.trials import Played

SLACK_S = 1.0
"""What a broken push may take beyond one operation timeout, beside the time that the learner's process waits for a turn on the
machine's cores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    over: str
    played: tuple[Played, ...]
    violations: tuple[str, ...]
    samples: int
    versions: int
    pause_s: float


def bound(operation_s: float) -> float:
    return operation_s + SLACK_S


def too_long(rounds: Sequence[Round], operation_s: float) -> list[str]:
    return [
        f"{round_.over}: {each.fault} at {each.moment} kept a version from going live for {each.stall_s:.2f} s"
        for round_ in rounds
        for each in round_.played
        if each.stall_s - each.late_s > bound(operation_s)
    ]


def table(rounds: Sequence[Round], *, command: str, operation_s: float) -> str:
    lines = [
        "",
        f"{'over':<8} {'fault':<16} {'trials':>6} {'stall p50':>10} {'worst':>7} {'late':>7} {'back, worst':>12}   moments",
    ]
    for over, fault, played in _by_fault(rounds):
        stalls = sorted(each.stall_s for each in played)
        moments = ", ".join(f"{name} {times}" for name, times in sorted(Counter(each.moment for each in played).items()))
        lines.append(
            f"{over:<8} {fault:<16} {len(played):>6} {stalls[len(stalls) // 2]:>8.2f} s {stalls[-1]:>5.2f} s "
            f"{max(played, key=lambda each: each.stall_s).late_s:>5.2f} s "
            f"{max(each.back_s for each in played):>10.2f} s   {moments}"
        )
    found = [each for round_ in rounds for each in round_.violations] + too_long(rounds, operation_s)
    versions, pause = sum(each.versions for each in rounds), max(each.pause_s for each in rounds)
    lines += ["", f"{versions} versions, {sum(each.samples for each in rounds)} changes of what a worker served"]
    lines += [f"longest pause between two sampled tokens of a worker that was not stopped: {pause:.2f} s"]
    lines += [f"bound on a stall, beside lateness: {operation_s:g} s (operation timeout) + {SLACK_S:g} s"]
    lines += [f"violations: {len(found)}", *(f"VIOLATION {each}" for each in found)]
    return "\n".join([*lines, f"again: {command}"])


def as_json(rounds: Sequence[Round], *, command: str, operation_s: float) -> dict[str, Any]:
    return {
        "command": command,
        "operation_timeout_s": operation_s,
        "stall_bound_s": bound(operation_s),
        "violations": [each for round_ in rounds for each in round_.violations],
        "stalls_too_long": too_long(rounds, operation_s),
        "faults": [
            {
                "over": over,
                "fault": fault,
                "trials": len(played),
                "worst_stall_s": max(each.stall_s for each in played),
                "worst_back_s": max(each.back_s for each in played),
            }
            for over, fault, played in _by_fault(rounds)
        ],
        "versions": sum(each.versions for each in rounds),
        "trials": [{"over": round_.over, **asdict(each)} for round_ in rounds for each in round_.played],
    }


def _by_fault(rounds: Sequence[Round]) -> Iterator[tuple[str, str, list[Played]]]:
    kinds = sorted({(round_.over, each.fault) for round_ in rounds for each in round_.played})
    for over, fault in kinds:
        yield over, fault, [each for round_ in rounds if round_.over == over for each in round_.played if each.fault == fault]
