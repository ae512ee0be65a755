"""What every process did in a window of time, as lanes of bars for the page "Fleet": from the recorded events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from async_rl.recording import Event, Recording

KINDS = ("group", "take", "step", "checkpoint", "push", "swap", "blocked", "process")
MOST_LANES, MOST_BARS = 64, 4000
"""Beyond these, the lanes with the fewest bars share one, and the oldest bars are left out."""
OTHERS = "other workers"
FIRST = ("run", "learner")
PUSHES = 10
"""Of the window, the last ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    lane: str
    kind: str
    begin: float
    """Seconds after the window's begin; below 0 if it began before."""
    seconds: float
    text: str


def read_lanes(recording: Recording, *, end: float, seconds: float) -> dict[str, Any]:
    """The window of `seconds` that ends at `end`, in seconds since 1970: lanes with their bars, and its pushes."""
    begin = end - seconds
    events = list(recording.events(since=begin, until=end, kinds=KINDS))
    bars = sorted((_bar(event, begin) for event in events), key=lambda bar: bar.begin)
    shown = bars[-MOST_BARS:]
    return {
        "begin": begin,
        "seconds": seconds,
        "left_out": len(bars) - len(shown),
        "lanes": _lanes(shown),
        "pushes": [_push(event) for event in events if event.kind == "push"][-PUSHES:],
    }


def _lanes(bars: Sequence[Bar]) -> list[dict[str, Any]]:
    found: dict[str, list[Bar]] = {}
    for bar in bars:
        found.setdefault(bar.lane, []).append(bar)
    workers = sorted((name for name in found if name not in FIRST), key=lambda name: -len(found[name]))
    kept, rest = sorted(workers[:MOST_LANES]), workers[MOST_LANES:]
    lanes = {name: found[name] for name in (*FIRST, *kept) if name in found}
    if rest:
        lanes[f"{len(rest)} {OTHERS}"] = [bar for name in rest for bar in found[name]]
    return [
        {"name": name, "bars": [(bar.kind, round(bar.begin, 4), round(bar.seconds, 4), bar.text) for bar in each]}
        for name, each in lanes.items()
    ]


def _bar(event: Event, begin: float) -> Bar:
    lane = str(event.fields.get("worker", event.process))
    return Bar(lane=lane, kind=event.kind, begin=event.at - begin, seconds=event.seconds, text=_text(event.kind, event.fields))


def _text(kind: str, fields: Mapping[str, Any]) -> str:
    """One sentence; a field that an event lacks is left empty."""

    def said(name: str) -> str:
        return str(fields.get(name, ""))

    match kind:
        case "group":
            return f"group {said('group')} of {said('environment')}: {said('fate')}"
        case "take":
            return f"waited for the groups of step {said('step')}"
        case "step":
            return f"step {said('step')}"
        case "checkpoint":
            return f"checkpoint of step {said('step')}; training stood still for {said('stall_s')} s"
        case "push":
            return f"push of version {said('version')} to {len(fields.get('staged', ()))} workers"
        case "swap":
            return f"serves version {said('version')} ({said('how')})"
        case "blocked":
            return f"blocked by {said('environment') or 'its own code'} at {said('place')}"
        case _:
            return f"{said('name')} {said('what')} {said('detail')}".rstrip()


def _push(event: Event) -> dict[str, Any]:
    names = ("version", "step", "bytes", "wait_s", "staged", "dropped")
    return {"at": event.at, "seconds": event.seconds} | {name: event.fields.get(name) for name in names}
