"""Parses the reply of scripts/stats.lua: counters, and with "everything" a snapshot of all tickets for the audit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from async_rl.replay_protocol import BufferStats
from buffer import keys
from buffer.rules.audit import BufferSnapshot
from buffer.rules.ticket_record import STATES, TicketState, parse_record
from buffer.run_in_redis import rows
from buffer.server.unexpected_replies import reading


def parse_stats(reply: list[Any], fence: int) -> BufferStats:
    """Return the counters; `reply` is name and value in turn."""
    fields: dict[str, Any] = {name.decode(): value for name, value in rows(reply, 2)}
    with reading("dropped"):
        dropped = {reason.decode(): int(number) for reason, number in rows(fields["dropped"], 2)}
    parsed: dict[str, Any] = {
        "fence": fence,
        "owed": float(fields["owed"]),
        "starving": fields["starving"] == 1,
        "dropped": dropped,
        "ready_by_version": dict(rows(fields["ready_by_version"], 2)),
        "tokens": {fate.decode(): tokens for fate, tokens in rows(fields["tokens"], 2) if tokens},
    }
    return BufferStats(**fields | parsed)


def parse_snapshot(reply: list[Any], fence: int) -> BufferSnapshot:
    """Return the counters with all tickets by place, their records and the sizes of their payloads."""
    leased, *placed, drawn, recorded, payloads = (
        {ticket.decode(errors="replace"): value for ticket, value in rows(pairs, 2)} for pairs in reply[-9:]
    )
    places = dict(zip(STATES, placed, strict=True))
    return BufferSnapshot(
        stats=parse_stats(reply[:-9], fence),
        places={state: tickets.keys() for state, tickets in places.items()},
        leased=leased.keys(),
        drawn=drawn.keys(),
        recorded=recorded.keys(),
        payloads=payloads,
        misfiled=_misfiled(places, recorded),
    )


def _misfiled(places: Mapping[TicketState, Mapping[str, bytes]], records: Mapping[str, bytes]) -> dict[str, str]:
    """Return the tickets whose set or score contradicts their record. Scripts select by score and decide by the record."""
    found: dict[str, str] = {}
    for ticket, text in records.items():
        try:
            record = parse_record(text)
            keys.ticket_number(ticket)
        except ValueError:
            found[ticket] = "recorded unreadably"
            continue
        born = {"reserved": record.version, "ready": record.oldest, "again": record.oldest}
        score = born.get(record.state, record.steps[-1] if record.steps else None)
        for place, tickets in places.items():
            if ticket in tickets and place != record.state:
                found[ticket] = f"{place} and recorded as {record.state}"
            elif ticket in tickets and score is not None and float(tickets[ticket]) != score:
                found[ticket] = f"{place} under another number than recorded"
    return found
