"""Pure: what a checkpoint makes of the tickets that a server knows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from async_rl.errors import ServerRewound
from async_rl.types import BufferPosition, OutstandingTicket
from buffer.keys import ticket_number
from buffer.rules.ticket_record import TicketRecord, TicketState

ENDED = "ended"
"""The verdict on a ticket that a checkpoint no longer knows."""


def rewound() -> ServerRewound:
    return ServerRewound(
        "Redis has lost changes that it had confirmed (a failover, or a backup); the learner starts from its checkpoint"
    )


def verdicts_on(
    records: Mapping[str, TicketRecord],
    position: BufferPosition | None,
    outstanding: Mapping[int, OutstandingTicket],
    *,
    is_older: bool,
) -> Iterator[tuple[str, str]]:
    """What recovery makes of each ticket: see scripts/settle.lua. A server that is older than the checkpoint may have gone on
    by itself meanwhile: of its tickets, those remain that the checkpoint knows by number, task and attempt.
    """
    for ticket, record in records.items():
        if record.state == "kept":
            continue
        number = ticket_number(ticket)
        steps = surviving_steps(number, record.state, record.steps, position, outstanding)
        if is_older and not _is_the_same(record, outstanding.get(number)):
            steps = None
        yield ticket, ENDED if steps is None else ",".join(map(str, steps)) or "-"


def _is_the_same(record: TicketRecord, ticket: OutstandingTicket | None) -> bool:
    if ticket is None or (record.task_index, record.attempt) != (ticket.task_index, ticket.attempt):
        return False
    return not (record.state == "reserved" and ticket.steps)  # what has trained already is not rolled out once more


def surviving_steps(
    number: int,
    state: TicketState,
    steps: Sequence[int],
    position: BufferPosition | None,
    outstanding: Mapping[int, OutstandingTicket],
) -> tuple[int, ...] | None:
    """The steps of a ticket's group that the recovered weights have seen, or None when the checkpoint says that it ended,
    whatever a server believes that was restored from a backup.
    """
    if position is None:
        return ()
    if number < position.next_ticket:
        return outstanding[number].steps if number in outstanding else None
    if state == "taken" and steps[-1] <= position.step:
        return None
    return tuple(step for step in steps if step <= position.step)
