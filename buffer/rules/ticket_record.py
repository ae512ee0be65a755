"""The ticket record: what Redis stores about a ticket. scripts/prelude.lua reads and writes the same text."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, cast, get_args

TicketState = Literal["reserved", "ready", "again", "taken", "kept"]
"""`again`: trained, and may train another step. `kept`: spent, and its payload is retained."""
STATES: tuple[TicketState, ...] = get_args(TicketState)

_TEXT = re.compile(
    r"(reserved|ready|again|taken|kept) (\d+) (\d+) (\d+) (\d+) (-?\d+) (-?\d+) (-?\d+) (\d+) (-|\d+(?:,\d+)*) ([^\t]*)\t(.*)",
    re.DOTALL,
)


class BadRecord(ValueError):
    """A ticket record that cannot be parsed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TicketRecord:
    state: TicketState
    task_index: int
    attempt: int
    failures: int
    """Failed earlier tickets of the task."""
    version: int
    """The live version when the ticket was issued."""
    oldest: int
    """Oldest version among the group's tokens; -1 while it is rolled out, as are the following two."""
    committed: int
    """The live version when the group was committed."""
    taken: int
    """The version being trained when it was last taken."""
    tokens: int
    steps: tuple[int, ...]
    """Steps that it was taken for."""
    worker: str
    environment: str
    """Empty while it is rolled out."""


def parse_record(text: bytes) -> TicketRecord:
    """Raises BadRecord."""
    found = _TEXT.fullmatch(text.decode(errors="replace"))
    if found is None:
        raise BadRecord("the record of a ticket is unreadable")
    state, task, attempt, failures, version, oldest, committed, taken, tokens, steps, worker, environment = found.groups()
    return TicketRecord(
        state=cast("TicketState", state),
        task_index=int(task),
        attempt=int(attempt),
        failures=int(failures),
        version=int(version),
        oldest=int(oldest),
        committed=int(committed),
        taken=int(taken),
        tokens=int(tokens),
        steps=() if steps == "-" else tuple(int(step) for step in steps.split(",")),
        worker=worker,
        environment=environment,
    )
