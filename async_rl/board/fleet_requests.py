"""Operators' requests to the processes of a run, wherever they were started: drain, and end."""

from __future__ import annotations

import asyncio

from async_rl.board.inbox import BoardMessage, Inbox, post
from async_rl.protocols import Board

REQUESTS = "fleet-requests"
"""The board's topic."""

LEARNER, EVALUATOR = "learner", "evaluator"
"""Names in requests; workers have the ids by which they are members."""


class DrainRequest(BoardMessage):
    process: str
    """Name of the process; empty: the whole fleet."""


async def ask_to_drain(board: Board, process: str = "") -> None:
    await post(board, REQUESTS, DrainRequest(process=process))


async def drain_on_request(board: Board, name: str, stop: asyncio.Event) -> None:
    """Service: set `stop` when an operator asks this process or the whole fleet to drain, as SIGTERM does.

    Requests from before its start are for processes that were there then.
    """
    inbox = await Inbox[DrainRequest].open(board, REQUESTS, DrainRequest)
    while True:
        if any(request.process in ("", name) for request in await inbox.read()):
            stop.set()
