"""A time window of a recording as a trace for Perfetto or chrome://tracing.

A process of the trace is a worker, the learner, or the run. A lane does one thing at a time: an episode of a worker, the
learner's steps, its pushes. Times are microseconds since the window's begin, on the learner's clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from async_rl.recording.events import Event

TraceEvent = dict[str, Any]
"""An object of the trace's `traceEvents`: `ph` is X (a span), i (a moment), C (a counter) or M (a name)."""

LEARNER, RUN = "learner", "run"
_LEARNER_LANES: Mapping[str, str] = {
    "take": "waits for groups",
    "step": "steps",
    "checkpoint": "checkpoints",
    "push": "weight pushes",
    "evaluation": "evaluations",
    "start": "steps",
    "drop": "drops",
}
_WORKER_LANES: Mapping[str, str] = {"swap": "weights", "blocked": "stalls", "failure": "failures"}


Spans = Sequence[Sequence[Any]]
"""What the episodes of a group did, as in the event `group` and in `GroupTimes.spans`."""


def chrome_trace(events: Iterable[Event], *, since: float, until: float, spans_of: Callable[[str], Spans]) -> dict[str, Any]:
    """Return the trace of the events that lie in the window, at least in part; spans are cut to it.

    `spans_of` returns the spans of a group whose event has none.
    """
    window = _Window(since=since, until=until, spans_of=spans_of)
    found = [event for event in events if event.at <= until and event.at + event.seconds >= since]
    for event in sorted(found, key=lambda event: event.at):
        window.rows.extend(_rows(event, window))
    return {
        "traceEvents": [*window.names(), *window.rows],
        "displayTimeUnit": "ms",
        "otherData": {"begin": since, "end": until},
    }


@dataclass(slots=True, kw_only=True)
class _Window:
    """The trace being made, with the numbers of processes and lanes."""

    since: float
    until: float
    spans_of: Callable[[str], Spans]
    rows: list[TraceEvent] = field(default_factory=list[TraceEvent])
    _processes: dict[str, int] = field(default_factory=dict[str, int])
    _lanes: dict[tuple[str, str], int] = field(default_factory=dict[tuple[str, str], int])
    _busy_until: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    """What needs several lanes (a worker, an episode) -> for each of them, until when it is taken."""

    def lane(self, process: str, lane: str) -> dict[str, int]:
        """Return the pid and tid of a lane, which are numbers."""
        pid = self._processes.setdefault(process, len(self._processes) + 1)
        return {"pid": pid, "tid": self._lanes.setdefault((process, lane), len(self._lanes) + 1)}

    def free_slot(self, of: str, start: float, stop: float) -> int:
        """Return the first lane that is free from `start` on, and take it until `stop`: spans of a lane do not overlap."""
        rows = self._busy_until.setdefault(of, [])
        slot = next((number for number, busy_until in enumerate(rows) if busy_until <= start), len(rows))
        rows[slot : slot + 1] = [stop]
        return slot

    def names(self) -> Iterator[TraceEvent]:
        order = {LEARNER: 0, RUN: 1}
        for process, pid in self._processes.items():
            yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": process}}
            place = order.get(process, 2)
            yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": place}}
        for (process, lane), tid in self._lanes.items():
            yield {"ph": "M", "name": "thread_name", "pid": self._processes[process], "tid": tid, "args": {"name": lane}}

    def span(
        self, name: str, where: dict[str, int], start: float, stop: float, args: Mapping[str, Any]
    ) -> Iterator[TraceEvent]:
        """Yield a span, cut to the window; nothing if it lies outside."""
        begin, end = max(start, self.since), min(stop, self.until)
        if begin <= end:
            span = {"ts": self._microseconds(begin), "dur": round((end - begin) * 1e6, 1)}
            yield {"ph": "X", "name": name, "cat": "async_rl", **where, **span, "args": dict(args)}

    def moment(self, name: str, where: dict[str, int], at: float, args: Mapping[str, Any]) -> Iterator[TraceEvent]:
        yield {"ph": "i", "s": "t", "name": name, "cat": "async_rl", **where, "ts": self._microseconds(at), "args": dict(args)}

    def counter(self, name: str, where: dict[str, int], at: float, values: Mapping[str, float]) -> Iterator[TraceEvent]:
        yield {"ph": "C", "name": name, **where, "ts": self._microseconds(at), "args": dict(values)}

    def _microseconds(self, at: float) -> float:
        return round((min(max(at, self.since), self.until) - self.since) * 1e6, 1)


def _rows(event: Event, window: _Window) -> Iterator[TraceEvent]:
    fields, start, stop = event.fields, event.at, event.at + event.seconds
    match event.kind:
        case "group":
            yield from _group(event, window)
        case "engine":
            load = {name: fields[name] for name in ("running", "waiting") if name in fields}
            where = window.lane(fields["worker"], "engine")
            yield from window.counter("engine load", where, stop, load)
            if event.seconds > 0:
                yield from window.counter("tokens/s", where, stop, {"tokens/s": fields.get("tokens", 0.0) / event.seconds})
        case "process":
            name = f"{fields['name']} {fields['what']}"
            yield from window.moment(name, window.lane(RUN, "processes"), start, fields)
        case kind if kind in _LEARNER_LANES or kind in _WORKER_LANES:
            is_workers = kind in _WORKER_LANES
            lane = (
                window.lane(fields["worker"], _WORKER_LANES[kind]) if is_workers else window.lane(LEARNER, _LEARNER_LANES[kind])
            )
            name = _named(event)
            spans = (
                window.span(name, lane, start, stop, fields) if event.seconds > 0 else window.moment(name, lane, start, fields)
            )
            yield from spans
        case _:
            pass


def _named(event: Event) -> str:
    fields = event.fields
    match event.kind:
        case "push" | "swap":
            return f"{event.kind} version {fields.get('version')}"
        case "drop":
            return f"dropped: {fields.get('reason')}"
        case "blocked":
            return f"blocked at {fields.get('place')}"
        case "failure":
            return str(fields.get("cause"))
        case kind:
            return f"{kind} {fields['step']}" if "step" in fields else kind


def _group(event: Event, window: _Window) -> Iterator[TraceEvent]:
    """Yield a lane for the group and one below it per episode; groups that overlap get lanes of their own."""
    fields, worker = event.fields, str(event.fields.get("worker"))
    slot = window.free_slot(worker, event.at, event.at + event.seconds)
    about = {name: value for name, value in fields.items() if name != "spans"}
    name, lane = f"{fields.get('group')} ({fields.get('fate')})", f"group {slot}"
    yield from window.span(name, window.lane(worker, lane), event.at, event.at + event.seconds, about)
    spans = fields["spans"] if "spans" in fields else window.spans_of(str(fields.get("group")))
    for stage, sibling, start, stop, oldest, newest in sorted(spans, key=lambda span: span[2]):
        episode = f"{lane}, episode {sibling}" if sibling >= 0 else f"{lane}, all episodes"
        beside = window.free_slot(f"{worker}/{episode}", event.at + start, event.at + stop)  # generations may run side by side
        where = window.lane(worker, f"{episode} ({beside + 1})" if beside else episode)
        versions = {} if oldest < 0 else {"oldest version": oldest, "newest version": newest}
        at = {"group": fields.get("group"), **versions}
        yield from window.span(stage, where, event.at + start, event.at + stop, at)
