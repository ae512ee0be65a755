"""What people ask the learner about weights, over the board, and what it answers. Data only.

async-rl weights ...  ── WeightRequest ──▶ learner ── WeightAnswer ──▶ whoever asked
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


class _Said(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str
    """Of the request."""


class WeightRequest(_Said):
    wish: WeightAction
    version: int | None = None
    step: int | None = None
    """Of the weights that are meant, where the wish is about certain ones."""


class LastPush(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    record: VersionRecord
    at: float
    """When it went live, in seconds since 1970."""
    seconds: float
    bytes: int
    """Of one copy of the weights."""
    staged: tuple[str, ...]
    dropped: dict[str, str]
    """Who was left out, and why."""


class WeightsState(BaseModel):
    """As the learner sees it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: int
    step: int
    """Of what it holds."""
    pinned: str
    """Why nothing newer than the live version goes out; empty when versions do."""
    last_push: LastPush | None


class WeightAnswer(_Said):
    said: str
    is_refusal: bool
    state: WeightsState


_REQUEST = TypeAdapter(WeightRequest)
_ANSWER = TypeAdapter(WeightAnswer)


async def open_requests(board: Board) -> Inbox[WeightRequest]:
    """From now on."""
    return await Inbox[WeightRequest].open(board, REQUESTS, _REQUEST)


async def answer(board: Board, given: WeightAnswer) -> None:
    await board.post(ANSWERS, given.model_dump(mode="json"))


async def ask(
    board: Board, wish: WeightAction, within_s: float, *, version: int | None = None, step: int | None = None
) -> WeightAnswer | None:
    """None when no learner answers."""
    request = WeightRequest(id=uuid.uuid4().hex, wish=wish, version=version, step=step)
    inbox = await Inbox[WeightAnswer].open(board, ANSWERS, _ANSWER)
    await board.post(REQUESTS, request.model_dump(mode="json"))
    try:
        async with asyncio.timeout(within_s):
            while True:
                for given in await inbox.read():
                    if given.id == request.id:
                        return given
    except TimeoutError:
        return None
