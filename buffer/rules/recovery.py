"""Pure: what happens to each ticket when a learner recovers from a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from async_rl.errors import ServerRewound
from async_rl.types import BufferPosition, OutstandingTicket
from buffer.keys import ticket_number
from buffer.rules.ticket_record import TicketRecord, TicketState

ENDED = "ended"
"""The verdict on a ticket that had ended by the checkpoint."""


def rewound() -> ServerRewound:
    """Return the error for a server that has lost confirmed changes."""
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
    """Yield ticket and verdict, as scripts/settle.lua takes them.

    A server that is older than the checkpoint may have issued tickets of its own since: only tickets that the checkpoint
    lists with the same number, task and attempt survive.
    """
    for ticket, record in records.items():
        if record.state == "kept":
            continue
        number = ticket_number(ticket)
        steps = surviving_steps(number, record.state, record.steps, position, outstanding)
        if is_older and not _is_the_same(record, outstanding.get(number)):
            steps = None
        yield ticket, ENDED if steps is None else ",".join(map(str, steps)) or "-"


def outstanding_steps(state: TicketState, steps: Sequence[int], step: int) -> tuple[int, ...] | None:
    """Return the steps up to `step` that trained a group; None if a checkpoint of `step` need not list its ticket."""
    if state == "kept" or (state == "taken" and max(steps, default=step + 1) <= step):
        return None
    return tuple(used for used in steps if used <= step)


def _is_the_same(record: TicketRecord, ticket: OutstandingTicket | None) -> bool:
    if ticket is None or (record.task_index, record.attempt) != (ticket.task_index, ticket.attempt):
        return False
    return not (record.state == "reserved" and ticket.steps)  # a group that has trained is not rolled out again


def surviving_steps(
    number: int,
    state: TicketState,
    steps: Sequence[int],
    position: BufferPosition | None,
    outstanding: Mapping[int, OutstandingTicket],
) -> tuple[int, ...] | None:
    """Return the steps that trained this group and are part of the recovered weights; None if its ticket has ended.

    The checkpoint decides, because the server may have been restored from an older backup.
    """
    if position is None:
        return ()
    if number < position.next_ticket:
        return outstanding[number].steps if number in outstanding else None
    if state == "taken" and steps[-1] <= position.step:
        return None
    return tuple(step for step in steps if step <= position.step)
