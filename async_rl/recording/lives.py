"""The life of a recorded group as a timeline: from the reservation of its ticket to the checkpoint that contains it."""

from __future__ import annotations

from dataclasses import dataclass

from async_rl.recording.recorded import RecordedGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class LifeSpan:
    """A stretch of a group's life. Times are on the learner's clock, in seconds since 1970."""

    what: str
    """An episode's: task, queue (waits for the engine), inference (one generation), environment, reward. The group's: rolled
    out, in queue (ready in the buffer), taken (waits for its step), trained, until checkpoint."""
    start: float
    stop: float
    sibling: int = -1
    """Number of the episode; -1: the whole group."""
    oldest_version: int = -1
    """The versions that sampled a generation. They differ if weights changed meanwhile; the keys and values of earlier
    tokens stay those of the older version."""
    newest_version: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    spans: tuple[LifeSpan, ...]
    """In the order in which they begin."""
    checkpoint_step: int | None
    """Step of the first checkpoint that contains it; None: there is none yet, or it was dropped."""

    def of(self, sibling: int) -> tuple[LifeSpan, ...]:
        """The spans of one episode, with those of the whole group."""
        return tuple(span for span in self.spans if span.sibling in (-1, sibling))


def life_of(group: RecordedGroup, checkpoint: tuple[int, float] | None) -> Life:
    """`checkpoint`: step of the first checkpoint that contains the group, and when it was complete."""
    facts, times = group.facts, group.content.times
    borders = [
        ("rolled out", facts.reserved_at, facts.ready_at),
        ("in queue", facts.ready_at, facts.taken_at),
        ("taken", facts.taken_at, facts.trained_from),
        ("trained", facts.trained_from, facts.trained_at),
        ("until checkpoint", facts.trained_at, checkpoint[1] if checkpoint is not None else 0.0),
    ]
    spans = [LifeSpan(what=what, start=start, stop=stop) for what, start, stop in borders if start and stop]
    for span in times.spans if times is not None and facts.reserved_at else ():
        spans.append(
            LifeSpan(
                what=span.stage,
                start=facts.reserved_at + span.start_s,
                stop=facts.reserved_at + span.stop_s,
                sibling=span.sibling,
                oldest_version=span.oldest_version,
                newest_version=span.newest_version,
            )
        )
    spans.sort(key=lambda span: (span.start, -span.stop))
    return Life(spans=tuple(spans), checkpoint_step=checkpoint[0] if checkpoint is not None else None)
