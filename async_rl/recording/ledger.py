"""Where every ticket and every token of a run is: trained, dropped for a reason, or in flight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from async_rl.recording.events import Event
from async_rl.replay_protocol import BufferStats


@dataclass(frozen=True, slots=True, kw_only=True)
class Fates:
    """The tickets of a run at one moment. `issued` = `trained` + all of `dropped` + all of `in_flight`; so do the tokens."""

    at: float
    """In seconds since 1970, on the learner's clock."""
    step: int
    issued: int
    trained: int
    """Trained in a step which a checkpoint contains."""
    dropped: Mapping[str, int]
    """By reason; also `quarantined`, and `lost_to_rollback`: their checkpoint is gone."""
    in_flight: Mapping[str, int]
    """reserved: being rolled out; ready; again: ready for another use; taken: trained in a step that no checkpoint contains."""
    tokens: Mapping[str, int]
    """Tokens of ended rollouts, prompts included, by the names of metrics: generated, trained, dropped/REASON, in_flight."""

    @property
    def shares(self) -> Mapping[str, float]:
        """The part of the tickets that met each fate, by name: trained, dropped/REASON, in_flight/STATE. They add up to 1."""
        parts = {"trained": self.trained}
        parts |= {f"dropped/{reason}": count for reason, count in self.dropped.items()}
        parts |= {f"in_flight/{state}": count for state, count in self.in_flight.items()}
        return {name: count / max(1, self.issued) for name, count in parts.items()}


def fates_event(stats: BufferStats, *, at: float, step: int) -> Event:
    dropped = {**stats.dropped, "quarantined": stats.quarantined, "lost_to_rollback": stats.lost_to_rollback}
    tickets = {
        "issued": stats.issued,
        "trained": stats.spent,
        "dropped": {reason: count for reason, count in dropped.items() if count},
        "in_flight": {"reserved": stats.reserved, "ready": stats.ready, "again": stats.again, "taken": stats.taken},
    }
    tokens = {"generated": 0, "trained": 0, **stats.tokens}
    named = {name if name in ("generated", "trained") else f"dropped/{name}": count for name, count in tokens.items()}
    return Event(
        kind="fates",
        at=at,
        fields={"step": step, "tickets": tickets, "tokens": {**named, "in_flight": stats.tokens_in_flight}},
    )


def fates_of(event: Event) -> Fates:
    return Fates(at=event.at, step=event.fields["step"], tokens=event.fields["tokens"], **event.fields["tickets"])
