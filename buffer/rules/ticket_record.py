"""A ticket's record: what Redis knows of a ticket beside its place. scripts/prelude.lua reads and writes the same text."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, cast

TicketState = Literal["reserved", "ready", "again", "taken", "kept"]
"""`again`: it has trained a step and may train another. `kept`: it is spent, and its payload is retained."""

_TEXT = re.compile(
    r"(reserved|ready|again|taken|kept) (\d+) (\d+) (\d+) (\d+) (-?\d+) (-?\d+) (-?\d+) (\d+) (-|\d+(?:,\d+)*) ([^\t]*)\t(.*)",
    re.DOTALL,
)


class BadRecord(ValueError):
    """Somebody else wrote there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TicketRecord:
    state: TicketState
    task_index: int
    attempt: int
    failures: int
    """Of the task's earlier tickets."""
    version: int
    """The live version when the ticket was issued."""
    oldest: int
    """Among the group's tokens; -1 while it is rolled out, as are the following two."""
    committed: int
    """The live version when the group was committed."""
    taken: int
    """The version that it was taken to train."""
    tokens: int
    steps: tuple[int, ...]
    """That it was taken for."""
    worker: str
    environment: str
    """Empty while it is rolled out."""


def parse_record(text: bytes) -> TicketRecord:
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
