"""What one worker did in a window of time, episode by episode, for the page "Fleet": from recorded events and groups."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from async_rl.recording import Event, Recording
from async_rl.view.recorded.lanes import MOST_BARS, MOST_LANES, Bar

ENGINE = "engine"
NOT_IN_A_LANE = ("rolled out", "in queue", "taken", "trained", "until checkpoint")
"""Stretches of a group's life that are not of an episode."""

Spans = Sequence[tuple[str, float, float]]
"""Stage, begin and end of each stretch, in seconds since 1970."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Episode:
    name: str
    spans: Spans

    @property
    def begin(self) -> float:
        return min(begin for _, begin, _ in self.spans)

    @property
    def end(self) -> float:
        return max(end for _, _, end in self.spans)


def read_episodes(recording: Recording, worker: str, *, begin: float, end: float) -> tuple[list[dict[str, Any]], int]:
    """Return lanes in the form of `read_lanes`, and how many bars are left out.

    The first lane is the engine's load between two reports. Below it each episode takes the first lane that is free, so
    that there are as many lanes as episodes ran side by side.
    """
    load: list[Bar] = []
    episodes: list[_Episode] = []
    for event in recording.events(since=begin, until=end, kinds=(ENGINE, "group")):
        if event.fields.get("worker") != worker:
            continue
        if event.kind == "group":
            episodes.extend(_episodes(recording, event))
        elif event.fields.get("running", 0) or event.fields.get("tokens", 0):
            load.append(_load(event, begin))
    lanes: list[list[Bar]] = []
    busy_until: list[float] = []
    for episode in sorted(episodes, key=lambda each: each.begin):
        if episode.begin > end or episode.end < begin:
            continue
        slot = next((number for number, busy in enumerate(busy_until) if busy <= episode.begin), len(busy_until))
        busy_until[slot : slot + 1] = [episode.end]
        if slot == len(lanes):
            lanes.append([])
        lanes[slot].extend(
            Bar(lane="", kind=stage, begin=start - begin, seconds=stop - start, text=episode.name)
            for stage, start, stop in episode.spans
        )
    named = {ENGINE: load} | {f"episodes {number + 1}": bars for number, bars in enumerate(lanes[:MOST_LANES])}
    shown = [
        {"name": name, "bars": [(bar.kind, round(bar.begin, 4), round(bar.seconds, 4), bar.text) for bar in bars[-MOST_BARS:]]}
        for name, bars in named.items()
        if bars
    ]
    return shown, len(load) + sum(map(len, lanes)) - sum(len(lane["bars"]) for lane in shown)


def _load(event: Event, begin: float) -> Bar:
    running, waiting, tokens = (event.fields.get(name, 0) for name in ("running", "waiting", "tokens"))
    text = f"{running:g} generations, {waiting:g} wait, {tokens:g} tokens"
    return Bar(lane=ENGINE, kind=ENGINE, begin=event.at - begin, seconds=event.seconds, text=text)


def _episodes(recording: Recording, event: Event) -> Iterator[_Episode]:
    """The episodes of a group; none if it was not measured or its record was let go."""
    found: dict[int, list[tuple[str, float, float]]] = {}
    for stage, sibling, start, stop in _stretches(recording, event):
        found.setdefault(sibling, []).append((stage, start, stop))
    for sibling, spans in sorted(found.items()):
        which = f"episode {sibling}" if sibling >= 0 else "all episodes"
        yield _Episode(name=f"{event.fields.get('group')}, {which}", spans=spans)


def _stretches(recording: Recording, event: Event) -> Iterator[tuple[str, int, float, float]]:
    if "spans" in event.fields:  # rollouts are not recorded
        for stage, sibling, start, stop, *_versions in event.fields["spans"]:
            yield stage, sibling, event.at + start, event.at + stop
    elif (group := recording.group(str(event.fields.get("group")))) is not None:
        for span in recording.life(group).spans:
            if span.what not in NOT_IN_A_LANE:
                yield span.what, span.sibling, span.start, span.stop
