"""The kinds of events with their fields, and the event as it stands in a file.

    {"kind": "push", "at": 1767225600.25, "s": 0.8, "process": "learner", "version": 7, ...}

`at` is when it began, in seconds since 1970 on the learner's clock, and `s` how long it took (0: a moment). A line is written
when the event has ended, so lines are not in the order of `at`. docs/recording.md lists the kinds and their fields.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from async_rl.durable.row_file import rows_of

_TABLE = """
start: the learner began, or resumed after `step`
  step version timeline
group: a group was rolled out, from the reservation of its ticket until its last episode was scored
  group task environment worker task_index attempt oldest_version newest_version rollouts sampled fate spans
take: the learner took the groups of a step, after waiting for them
  step version groups
step: the step was trained and its version issued; before it, the learner waited `wait_s` for groups
  step version groups skipped wait_s idle
checkpoint: a checkpoint was written; training stood still for `stall_s`
  step bytes stall_s
push: weights were sent; `dropped`: worker -> why it lacks them; `how`: worker -> memory, gloo or nccl, and whether as a delta
  version step bytes wait_s staged dropped how
swap: a worker began to serve a version that it was sent (how: push) or fetched (catch_up)
  worker version how
engine: load of a worker's engine, and tokens sampled since its last report
  worker inflight running waiting tokens kv_used
drop: a ticket ended untrained, as the buffer says: the reason of the drop, or quarantined
  group reason
process: a process was started, restarted or lost, or has left; the learner says which workers joined and are silent
  name what pid detail
failure: episodes failed for a cause, 1, 10, 100, ... times in a worker
  worker environment cause detail times
blocked: code blocks a worker's event loop
  worker environment place seconds
evaluation: an evaluation ended
  step version metrics
clock: what is added to the times of a worker to get the learner's
  worker offset_s
fates: where every ticket and token is (`Fates`)
  step tickets tokens
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventKind:
    name: str
    fields: frozenset[str]
    help: str


EVENT_KINDS: Mapping[str, EventKind] = {
    name: EventKind(name=name, fields=frozenset(fields.split()), help=help)
    for name, help, fields in re.findall(r"^(\w+): (.+)\n  (.+)$", _TABLE, re.M)
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    kind: str
    at: float
    """When it began, in seconds since 1970 on the learner's clock."""
    seconds: float = 0.0
    """How long it took; 0: a moment."""
    process: str = "learner"
    """The process that wrote it: learner, run (the supervisor of `async-rl run`)."""
    fields: Mapping[str, Any]
    """By the names in `EVENT_KINDS`."""


_JSON = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False)


def compact_json(value: object) -> bytes:
    """Return one line of JSON. A character that UTF-8 lacks, half of a pair, becomes `?`."""
    return _JSON.encode(value).encode(errors="replace")


def write_event(event: Event) -> bytes:
    """Return the line of an event. Raises ValueError for a kind or field that the table lacks."""
    kind = EVENT_KINDS.get(event.kind)
    if kind is None:
        raise ValueError(f"the kind {event.kind!r} is not in async_rl/recording/events.py")
    if unknown := event.fields.keys() - kind.fields:
        raise ValueError(f"the field {min(unknown)!r} of {event.kind!r} is not in async_rl/recording/events.py")
    head = {"kind": event.kind, "at": round(event.at, 6), "s": round(event.seconds, 6), "process": event.process}
    return compact_json({**head, **event.fields})


def read_events(path: Path, kinds: Collection[str] | None = None) -> Iterator[Event]:
    """The events of a file, in the order in which they were written. Lines that are no events are skipped."""
    wanted = None if kinds is None else tuple(f'{{"kind":"{kind}",'.encode() for kind in kinds)
    for line in rows_of(path):
        if (wanted is None or line.startswith(wanted)) and (event := _parsed(line)) is not None:
            yield event


def _parsed(line: bytes) -> Event | None:
    try:
        row = json.loads(line)
        head = {"kind": row.pop("kind"), "at": row.pop("at"), "seconds": row.pop("s"), "process": row.pop("process")}
    except (ValueError, LookupError, TypeError, AttributeError):
        return None
    return Event(**head, fields=cast("dict[str, Any]", row))


def count_events(path: Path) -> tuple[Mapping[str, int], float]:
    """Return how many events a file holds, and when it was last written."""
    return {"events": sum(1 for _ in rows_of(path))}, path.stat().st_mtime
