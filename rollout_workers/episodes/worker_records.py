"""What a worker tells the learner's recording, beside the groups that it commits: dropped groups and swaps of weights."""

from __future__ import annotations

import base64
import time
from collections import deque

from async_rl.board.worker_reports import DroppedGroup, WeightSwap, WorkerRecord
from async_rl.payloads.codec import BadPayload, encode
from async_rl.recording.recorded import head_of
from async_rl.types import RolloutGroup, Ticket

MAX_BYTES = 64 * 1024
"""Limit of the dropped groups in one message, which is posted every heartbeat; further ones are only counted."""
MAX_SWAPS = 64


class WorkerRecords:
    """Collects until `take`, which is called every heartbeat."""

    def __init__(self, worker: str, *, keeps_dropped: bool) -> None:
        """Without `keeps_dropped`, dropped groups are not collected."""
        self._worker, self._keeps_dropped = worker, keeps_dropped
        self._dropped: list[DroppedGroup] = []
        self._swaps: deque[WeightSwap] = deque(maxlen=MAX_SWAPS)
        self._bytes = self._unsent = 0

    def dropped(self, ticket: Ticket, fate: str, group: RolloutGroup) -> None:
        """Keep the head of a group that was dropped."""
        if not self._keeps_dropped:
            return
        try:
            head, counts = head_of(group)
            payload = base64.b64encode(encode(head, compress_text=True)).decode()
        except (BadPayload, TypeError, AttributeError, ValueError):  # values of user code that are no texts or messages
            self._unsent += 1
            return
        if self._bytes + len(payload) > MAX_BYTES:
            self._unsent += 1
            return
        self._bytes += len(payload)
        self._dropped.append(
            DroppedGroup(fate=fate, task_index=ticket.task_index, attempt=ticket.attempt, counts=counts, payload=payload)
        )

    def swapped(self, version: int, seconds: float) -> None:
        """Keep that the worker has just begun to serve a version."""
        self._swaps.append(WeightSwap(version=version, at=time.time() - seconds, seconds=seconds))

    def take(self) -> WorkerRecord | None:
        """Return what was collected since the last call; None: nothing."""
        if not (self._dropped or self._swaps or self._unsent):
            return None
        record = WorkerRecord(worker=self._worker, dropped=tuple(self._dropped), swaps=tuple(self._swaps), unsent=self._unsent)
        self._dropped, self._bytes, self._unsent = [], 0, 0
        self._swaps.clear()
        return record
