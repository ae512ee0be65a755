"""What a worker is doing about the versions that come to it: one value, and what every event makes of it. Pure.

    Idle ──PushOffer──▶ Offered ──PushBegin──▶ Receiving ──Received──▶ Staged ──it is live──▶ Idle
      └──────────────────────────── Received, by a catch-up ─────────────▲

A newer offer is taken in every state. What ends without a version ends in Idle.
"""

from __future__ import annotations

from dataclasses import dataclass

from async_rl.protocols import Member
from async_rl.transport.messages import PushBegin, PushCancel, PushOffer
from async_rl.transport.receiving.parcel_receiver import ReceivedVersion
from async_rl.types import VersionRecord


@dataclass(frozen=True, slots=True)
class _OfAttempt:
    attempt: tuple[int, int] = (-1, -1)
    """Fence and generation of the newest offer. Messages of older ones belong to attempts that ended."""


@dataclass(frozen=True, slots=True)
class Idle(_OfAttempt):
    """Nothing is on its way."""


@dataclass(frozen=True, slots=True)
class Offered(_OfAttempt):
    """The worker prepares to receive, replies, and waits for the transfer to begin."""


@dataclass(frozen=True, slots=True)
class Receiving(_OfAttempt):
    """The parcels are arriving."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged(_OfAttempt):
    """A complete version, to be served once it is live."""

    received: ReceivedVersion

    @property
    def record(self) -> VersionRecord:
        return self.received.expected.record


Reception = Idle | Offered | Receiving | Staged


@dataclass(frozen=True, slots=True, kw_only=True)
class Received(_OfAttempt):
    """A version is complete: the attempt's, or one that a catch-up fetched while this attempt was the newest."""

    received: ReceivedVersion


@dataclass(frozen=True, slots=True)
class ReceiveFailed(_OfAttempt):
    """A push cannot be received."""


ReceptionEvent = PushOffer | PushBegin | PushCancel | Received | ReceiveFailed | VersionRecord
"""The record is the live version's."""


def next_reception(state: Reception, event: ReceptionEvent, worker: Member) -> Reception:
    """The state after an event; the same object when it has no effect."""
    match event, state:
        case PushOffer(fence=fence, generation=generation), _:
            is_old = fence == state.attempt[0] and generation <= state.attempt[1]
            if worker.id not in event.to or is_old:
                return state
            return Idle(event.attempt) if worker.version >= event.record.version else Offered(event.attempt)
        case VersionRecord(version=live), Staged(record=staged):
            is_over = staged == event or staged.version < live
            return Idle(state.attempt) if is_over else state
        case VersionRecord(), _:
            return state
        case _ if event.attempt != state.attempt:
            return state
        case PushBegin(members=members), Offered():
            return Receiving(state.attempt) if worker.id in members else Idle(state.attempt)
        case Received(received=received), Receiving() | Idle():
            return Staged(state.attempt, received=received)
        case ((PushCancel() | ReceiveFailed()), (Offered() | Receiving())):
            return Idle(state.attempt)
        case _:
            return state
