"""Workers' reports on the board: failures of episodes, code that blocks a worker, and what the learner records of a worker."""

from __future__ import annotations

from async_rl.board.inbox import BoardMessage

NOTES, BLOCKED, RECORDS = "worker-notes", "worker-blocked", "worker-records"
"""The board's topics."""


class WorkerNote(BoardMessage):
    """A cause of failures, reported when it has occurred 1, 10, 100, ... times in a worker."""

    worker: str
    environment: str
    cause: str
    """The same text for the same cause in all workers."""
    detail: str
    """Details of the last occurrence."""
    times: int


class WorkerBlocked(BoardMessage):
    """A worker's event loop is blocked, and with it everything that the worker does."""

    worker: str
    environment: str
    """Empty: other code than an environment's blocks."""
    place: str
    """`file.py:12 in reward`"""
    seconds: float
    at: float
    """When it was found, in seconds since 1970."""
    is_replaced: bool
    """The worker exits; its supervisor, if it has one, starts it again."""

    def __str__(self) -> str:
        who = f"environment {self.environment!r}" if self.environment else "its own code"
        blocked = f"worker {self.worker} is blocked by {who} at {self.place}, for {self.seconds:.0f} s by now"
        return f"{blocked}, and is replaced" if self.is_replaced else blocked


class DroppedGroup(BoardMessage):
    """The head of a group that ended untrained."""

    fate: str
    """The reason of the drop."""
    task_index: int
    attempt: int
    counts: tuple[tuple[int, int], ...]
    """Sampled tokens and tokens of each rollout."""
    payload: str
    """The group without tokens, encoded by async_rl/payloads/, as base64."""


class WeightSwap(BoardMessage):
    version: int
    at: float
    """When it began, in seconds since 1970 by the worker's clock."""
    seconds: float


class WorkerRecord(BoardMessage):
    """What a worker tells the learner's recording once a heartbeat, if there is anything."""

    worker: str
    dropped: tuple[DroppedGroup, ...] = ()
    swaps: tuple[WeightSwap, ...] = ()
    unsent: int = 0
    """Dropped groups that did not fit into the message."""
