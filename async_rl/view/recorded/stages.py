"""Where the time of episodes went, by stage. While code blocks a worker, nothing in it goes on: that time is no stage's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from async_rl.recording import Event, RecordedGroup, Recording
from async_rl.recording.rows import TRAINED

GROUPS = 40
"""Groups of which the episodes are looked at."""
GROUPS_BYTES = 8 * 2**20
"""Bytes of groups that are read at most."""
STAGES = ("task", "queue", "inference", "environment", "reward")
BLOCKED = "blocked"


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A time in which code blocked a worker: at least that long, as it is reported before it ends."""

    start: float
    stop: float
    place: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Seconds of the latest trained episodes, added up by stage; `blocked` is one of them."""

    episodes: int
    seconds: Mapping[str, float] = field(default_factory=dict[str, float])
    environments: frozenset[str] = frozenset()

    def mean(self, stage: str) -> float:
        return self.seconds.get(stage, 0.0) / max(1, self.episodes)


def blocks_by_worker(events: Iterable[Event]) -> Mapping[str, Sequence[Block]]:
    """Return the blocks of each worker. A block that was reported twice is one."""
    found: defaultdict[str, list[Block]] = defaultdict(list)
    for event in sorted((event for event in events if event.kind == BLOCKED), key=lambda event: event.at):
        block = Block(start=event.at, stop=event.at + event.seconds, place=str(event.fields.get("place", "")))
        of_worker = found[str(event.fields.get("worker", ""))]
        if of_worker and block.start < of_worker[-1].stop:
            before = of_worker.pop()
            block = Block(start=before.start, stop=max(before.stop, block.stop), place=before.place)
        of_worker.append(block)
    return found


def blocked_s(start: float, stop: float, blocks: Sequence[Block]) -> float:
    """Return how long a span of a worker was blocked."""
    return sum(max(0.0, min(stop, block.stop) - max(start, block.start)) for block in blocks)


def latest_stages(recording: Recording) -> StageTimes:
    """Return the times of the latest trained groups."""
    groups = list(_latest_groups(recording))
    began = min((group.facts.reserved_at for group in groups if group.facts.reserved_at), default=0.0)
    blocks = blocks_by_worker(recording.events(since=began, kinds=(BLOCKED,)) if began else ())
    spent: defaultdict[str, float] = defaultdict(float)
    episodes = 0
    for group in groups:
        siblings, reserved_at = len(group.content.rollouts), group.facts.reserved_at
        own = blocks.get(group.content.worker, ()) if reserved_at else ()
        episodes += siblings
        for span in group.content.times.spans if group.content.times is not None else ():
            weight, seconds = 1 if span.sibling >= 0 else siblings, span.stop_s - span.start_s
            blocked = blocked_s(reserved_at + span.start_s, reserved_at + span.stop_s, own)
            spent[span.stage] += weight * max(0.0, seconds - blocked)
            if blocked:
                spent[BLOCKED] += weight * blocked
    return StageTimes(episodes=episodes, seconds=spent, environments=frozenset(group.task.environment for group in groups))


def _latest_groups(recording: Recording) -> Iterable[RecordedGroup]:
    read_bytes = 0
    trained = (row for row in reversed(recording.groups()) if row.fate == TRAINED)
    for row in islice(trained, GROUPS):
        if (read_bytes := read_bytes + row.length) > GROUPS_BYTES and read_bytes > row.length:
            break
        group = recording.group(row.id)
        if group is not None and group.content.times is not None:
            yield group
