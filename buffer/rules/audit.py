"""Pure: the conservation check. Every ticket ever issued is in exactly one place, and nothing else is stored."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from itertools import combinations

from async_rl.replay_protocol import Audit, BufferStats
from buffer.rules.ticket_record import TicketState


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferSnapshot:
    """Everything the buffer holds at one moment, by ticket id."""

    stats: BufferStats
    places: Mapping[TicketState, AbstractSet[str]]
    leased: AbstractSet[str]
    drawn: AbstractSet[str]
    """Groups in the weighted draw."""
    recorded: AbstractSet[str]
    """Tickets that have a record."""
    payloads: Mapping[str, int]
    """Ticket -> size in bytes."""
    misfiled: Mapping[str, str] = field(default_factory=dict[str, str])
    """Tickets whose record contradicts the place they are in -> the contradiction."""


def audit(snapshot: BufferSnapshot) -> Audit:
    return Audit(problems=(*_misplaced(snapshot), *_miscounted(snapshot)), stats=snapshot.stats)


def _misplaced(snapshot: BufferSnapshot) -> list[str]:
    places = snapshot.places
    somewhere = frozenset[str]().union(*places.values())
    held, ready = somewhere - places["reserved"], places["ready"] | places["again"]
    payloads = snapshot.payloads.keys()
    suspects: dict[str, AbstractSet[str]] = {
        f"both {one} and {other}": places[one] & places[other] for one, other in combinations(places, 2)
    } | {
        "reserved without a lease": places["reserved"] - snapshot.leased,
        "leased without being reserved": snapshot.leased - places["reserved"],
        "ready outside the weighted draw": ready - snapshot.drawn,
        "in the weighted draw without being ready": snapshot.drawn - ready,
        "somewhere without a record": somewhere - snapshot.recorded,
        "recorded without being anywhere": snapshot.recorded - somewhere,
        "without their payload": held - payloads,
        "only payloads, without a group": payloads - held,
    }
    for ticket, how in snapshot.misfiled.items():
        suspects[how] = {*suspects.get(how, ()), ticket}
    return [f"{len(ids)} tickets are {what}, for example {min(ids)}" for what, ids in suspects.items() if ids]


def _miscounted(snapshot: BufferSnapshot) -> list[str]:
    stats = snapshot.stats
    ended = stats.spent + stats.lost_to_rollback + sum(stats.dropped.values()) + stats.quarantined
    placed = stats.reserved + stats.ready + stats.again + stats.taken + ended
    problems: list[str] = []
    if placed != stats.issued:
        problems.append(f"{stats.issued} tickets were issued, but {placed} are accounted for")
    size = sum(snapshot.payloads.values())
    if size != stats.bytes:
        problems.append(f"{stats.bytes} payload bytes are counted, but {size} are held")
    return problems
