"""What each event makes of what a worker does about the versions that come to it."""

from __future__ import annotations

import pytest

from async_rl.protocols import Member
from async_rl.transport.messages import PushBegin, PushCancel, PushOffer
from async_rl.transport.plan import plan_layout
from async_rl.transport.receiving.parcel_receiver import ExpectedVersion, ReceivedVersion
from async_rl.transport.receiving.received_weights import ReceivedWeights
from async_rl.transport.receiving.reception import (
    Idle,
    Offered,
    Received,
    ReceiveFailed,
    Receiving,
    Reception,
    ReceptionEvent,
    Staged,
    next_reception,
)
from async_rl.types import VersionRecord

ME = Member(id="me", host="localhost", version=4, device="cpu")
FENCE = 3
OLDER, NOW, NEWER = ((FENCE, generation) for generation in (6, 7, 8))


def record(version: int, digest: str = "") -> VersionRecord:
    return VersionRecord(version=version, timeline="a", step=version, digest=digest)


def received(version: int) -> ReceivedVersion:
    layout = plan_layout([], {})
    expected = ExpectedVersion(record=record(version), layout=layout, packed=(), mapped={})
    return ReceivedVersion(expected=expected, weights=ReceivedWeights(layout, []), own={})


def offer(attempt: tuple[int, int], version: int = 5, to: str = "me") -> PushOffer:
    return PushOffer(fence=attempt[0], generation=attempt[1], to=("another", to), record=record(version))


def begin(attempt: tuple[int, int], *members: str) -> PushBegin:
    return PushBegin(
        fence=attempt[0], generation=attempt[1], members=members, groups=(), backend="gloo", transfer_bytes=1
    )  # fmt: skip


def cancel(attempt: tuple[int, int]) -> PushCancel:
    return PushCancel(fence=attempt[0], generation=attempt[1])


FIVE = received(5)
IDLE, OFFERED, RECEIVING, STAGED = Idle(NOW), Offered(NOW), Receiving(NOW), Staged(NOW, received=FIVE)
EVERY: list[Reception] = [IDLE, OFFERED, RECEIVING, STAGED]


@pytest.mark.parametrize("state", EVERY, ids=lambda state: type(state).__name__)
@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (offer(NEWER), Offered(NEWER)),
        (offer((FENCE + 1, 0)), Offered((FENCE + 1, 0))),
        (offer(NEWER, version=4), Idle(NEWER)),
        (offer(NEWER, to="somewhere else"), None),
        (offer(NOW), None),
        (offer(OLDER), None),
        (begin(OLDER, "me"), None),
        (begin(NEWER, "me"), None),
        (cancel(OLDER), None),
        (Received(OLDER, received=FIVE), None),
        (ReceiveFailed(OLDER), None),
        (record(4), None),
    ],
)
def test_in_every_state_a_newer_offer_is_taken_and_what_is_old_ignored(
    state: Reception, event: ReceptionEvent, expected: Reception | None
) -> None:
    found = next_reception(state, event, ME)
    assert found == expected if expected is not None else found is state


@pytest.mark.parametrize(
    ("state", "event", "expected"),
    [
        (OFFERED, begin(NOW, "another", "me"), RECEIVING),
        (OFFERED, begin(NOW, "another"), IDLE),
        (OFFERED, cancel(NOW), IDLE),
        (OFFERED, ReceiveFailed(NOW), IDLE),
        (RECEIVING, cancel(NOW), IDLE),
        (RECEIVING, ReceiveFailed(NOW), IDLE),
        (RECEIVING, Received(NOW, received=FIVE), STAGED),
        (IDLE, Received(NOW, received=FIVE), STAGED),
        (STAGED, record(5), IDLE),
        (STAGED, record(6), IDLE),
    ],
)
def test_what_an_event_changes(state: Reception, event: ReceptionEvent, expected: Reception) -> None:
    assert next_reception(state, event, ME) == expected


@pytest.mark.parametrize(
    ("event", "states"),
    [
        (begin(NOW, "me"), [IDLE, RECEIVING, STAGED]),
        (begin(NOW, "another"), [IDLE, RECEIVING, STAGED]),
        (cancel(NOW), [IDLE, STAGED]),
        (ReceiveFailed(NOW), [IDLE, STAGED]),
        (Received(NOW, received=FIVE), [OFFERED, STAGED]),
        (record(6), [IDLE, OFFERED, RECEIVING]),
        (record(5, digest="of something else"), [STAGED]),
    ],
)
def test_what_an_event_does_not_change(event: ReceptionEvent, states: list[Reception]) -> None:
    for state in states:
        assert next_reception(state, event, ME) is state


def test_before_the_first_offer_any_attempt_is_new() -> None:
    assert next_reception(Idle(), offer((0, 0)), ME) == Offered((0, 0))
