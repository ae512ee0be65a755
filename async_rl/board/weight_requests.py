"""Operators' requests to the learner about weights, over the board, and its answers. Data only.

async-rl weights ...  ── WeightRequest ──▶ learner ── WeightAnswer ──▶ async-rl weights
"""

from __future__ import annotations

import asyncio
import uuid
from typing import Literal

from pydantic import BaseModel, ConfigDict, TypeAdapter

from async_rl.board.inbox import Inbox
from async_rl.protocols import Board
from async_rl.types import VersionRecord

REQUESTS = "weight-requests"
ANSWERS = "weight-answers"
"""Topics of the board."""

WeightAction = Literal["status", "push", "pin", "unpin", "roll back"]


class _WeightMessage(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str
    """Identifies the request."""


class WeightRequest(_WeightMessage):
    action: WeightAction
    version: int | None = None
    step: int | None = None
    """The version or step of the requested weights, for `pin` and `roll back`."""


class LastPush(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    record: VersionRecord
    at: float
    """When it went live, in seconds since 1970."""
    seconds: float
    bytes: int
    """Size of one copy of the weights."""
    staged: tuple[str, ...]
    dropped: dict[str, str]
    """Member id -> why it did not get the version."""


class WeightsState(BaseModel):
    """The learner's view."""

    model_config = ConfigDict(extra="forbid", frozen=True)

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


_REQUEST = TypeAdapter(WeightRequest)
_ANSWER = TypeAdapter(WeightAnswer)


async def open_requests(board: Board) -> Inbox[WeightRequest]:
    """An inbox for requests from now on."""
    return await Inbox[WeightRequest].open(board, REQUESTS, _REQUEST)


async def post_answer(board: Board, answer: WeightAnswer) -> None:
    await board.post(ANSWERS, answer.model_dump(mode="json"))


async def ask(
    board: Board, action: WeightAction, within_s: float, *, version: int | None = None, step: int | None = None
) -> WeightAnswer | None:
    """Post a request and wait for the answer; None when no learner answers within `within_s`."""
    request = WeightRequest(id=uuid.uuid4().hex, action=action, version=version, step=step)
    inbox = await Inbox[WeightAnswer].open(board, ANSWERS, _ANSWER)
    await board.post(REQUESTS, request.model_dump(mode="json"))
    try:
        async with asyncio.timeout(within_s):
            while True:
                for answer in await inbox.read():
                    if answer.id == request.id:
                        return answer
    except TimeoutError:
        return None
