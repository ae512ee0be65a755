"""What every process did in a window of time, as lanes of bars for the page "Fleet": from the recorded events."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest
from typing import Any

from async_rl.recording import Event, Recording

KINDS = ("group", "take", "step", "checkpoint", "push", "swap", "blocked", "process")
MOST_LANES, MOST_BARS = 64, 4000
"""Beyond these, the lanes with the fewest bars share one, and the shortest bars are left out."""
ALWAYS = ("blocked", "process")
"""Kinds that are left out last: they are few, and what people look for."""
OTHERS = "other workers"
FIRST = ("run", "learner")
PUSHES = 10
"""Pushes that are listed: the last ones of the window."""
SHORTEST_S = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    lane: str
    kind: str
    begin: float
    """Seconds after the window's begin; below 0 if it began before."""
    seconds: float
    text: str


def read_lanes(recording: Recording, *, begin: float | None, end: float, worker: str = "") -> dict[str, Any]:
    """The lanes with their bars, and the pushes, of the window from `begin` to `end`, in seconds since 1970.

    It begins at the earliest with the first recorded event (None: there). `worker`: only this one, without pushes.
    """
    first = next(recording.events(), None)
    recorded_from = first.at if first is not None else end
    begin = min(recorded_from if begin is None else max(begin, recorded_from), end - SHORTEST_S)
    pushes: deque[Event] = deque(maxlen=PUSHES)
    counted: Counter[str] = Counter()

    def bars() -> Iterator[Bar]:
        for event in recording.events(since=begin, until=end, kinds=KINDS):
            if worker and event.fields.get("worker") != worker:
                continue
            counted[event.kind] += 1
            if event.kind == "push":
                pushes.append(event)
            yield _bar(event, begin)

    shown = nlargest(MOST_BARS, bars(), key=lambda bar: (bar.kind in ALWAYS, bar.seconds))
    return {
        "begin": begin,
        "seconds": end - begin,
        "recorded_from": recorded_from,
        "left_out": counted.total() - len(shown),
        "lanes": _lanes(sorted(shown, key=lambda bar: bar.begin)),
        "pushes": [_push(event) for event in pushes],
        "num_pushes": counted["push"],
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
    """What the page writes behind the kind; a field that an event lacks is left empty."""

    def said(name: str) -> str:
        return str(fields.get(name, ""))

    match kind:
        case "group":
            return f"{said('group')} of {said('environment')}: {said('fate')}"
        case "take":
            return f"of step {said('step')}"
        case "step":
            return f"step {said('step')}"
        case "checkpoint":
            return f"of step {said('step')}; training stood still for {said('stall_s')} s"
        case "push":
            return f"version {said('version')} to {len(fields.get('staged', ()))} workers"
        case "swap":
            return f"version {said('version')} ({said('how')})"
        case "blocked":
            return f"by {said('environment') or 'its own code'} at {said('place')}"
        case _:
            return f"{said('name')} {said('what')} {said('detail')}".rstrip()


def _push(event: Event) -> dict[str, Any]:
    names = ("version", "step", "bytes", "staged", "dropped", "how")
    wait_s = event.fields.get("wait_s", 0.0)
    return {"at": event.at, "seconds": event.seconds, "wait_s": wait_s} | {name: event.fields.get(name) for name in names}
