"""What workers say on the board for people: what went wrong in episodes, and which environment holds a worker up."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, TypeAdapter

NOTES, BLOCKED = "worker-notes", "worker-blocked"
"""The board's topics."""


class WorkerNote(BaseModel):
    """A cause, when it has come once, ten, a hundred, ... times in a worker."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    worker: str
    environment: str
    cause: str
    """The same text for the same cause, in all workers."""
    detail: str
    """Of the last time."""
    times: int


class WorkerBlocked(BaseModel):
    """The event loop of a worker stands still, and with it all that the worker does."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    worker: str
    environment: str
    """Empty where it is not an environment's code that blocks."""
    place: str
    """`file.py:12 in reward`"""
    seconds: float
    at: float
    """When it was found, in seconds since 1970."""
    is_replaced: bool
    """The worker ends, and is started again if something supervises it."""

    def __str__(self) -> str:
        who = f"environment {self.environment!r}" if self.environment else "its own code"
        blocked = f"worker {self.worker} is blocked by {who} at {self.place}, for {self.seconds:.0f} s by now"
        return f"{blocked}, and is replaced" if self.is_replaced else blocked


NOTE_MESSAGES: TypeAdapter[WorkerNote] = TypeAdapter(WorkerNote)
BLOCKED_MESSAGES: TypeAdapter[WorkerBlocked] = TypeAdapter(WorkerBlocked)
