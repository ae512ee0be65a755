"""Operators' requests to the learner about weights, over the board, and its answers. Data only.

async-rl weights ...  ── WeightRequest ──▶ learner ── WeightAnswer ──▶ async-rl weights
"""

from __future__ import annotations

import asyncio
import uuid
from typing import Literal

from async_rl.board.inbox import BoardMessage, Inbox, post
from async_rl.protocols import Board
from async_rl.types import VersionRecord

REQUESTS = "weight-requests"
ANSWERS = "weight-answers"
"""Topics of the board."""

WeightAction = Literal["status", "push", "pin", "unpin", "roll back"]


class _WeightMessage(BoardMessage):
    id: str
    """Identifies the request."""


class WeightRequest(_WeightMessage):
    action: WeightAction
    version: int | None = None
    step: int | None = None
    """The version or step of the requested weights, for `pin` and `roll back`."""


class LastPush(BoardMessage):
    record: VersionRecord
    at: float
    """When it went live, in seconds since 1970."""
    seconds: float
    bytes: int
    """Size of one copy of the weights."""
    staged: tuple[str, ...]
    dropped: dict[str, str]
    """Member id -> why it did not get the version."""


class WeightsState(BoardMessage):
    """The learner's view."""

    version: int
    step: int
    """Version and step of the weights that the learner holds."""
    pinned: str
    """Why no version newer than the live one is pushed; empty: not pinned."""
    last_push: LastPush | None


class WeightAnswer(_WeightMessage):
    text: str
    """One sentence for the operator; empty for `status`."""
    is_refusal: bool
    state: WeightsState


async def ask(
    board: Board, action: WeightAction, within_s: float, *, version: int | None = None, step: int | None = None
) -> WeightAnswer | None:
    """Post a request and wait for the answer; None when no learner answers within `within_s`."""
    request = WeightRequest(id=uuid.uuid4().hex, action=action, version=version, step=step)
    inbox = await Inbox[WeightAnswer].open(board, ANSWERS, WeightAnswer)
    await post(board, REQUESTS, request)
    try:
        async with asyncio.timeout(within_s):
            while True:
                for answer in await inbox.read():
                    if answer.id == request.id:
                        return answer
    except TimeoutError:
        return None
