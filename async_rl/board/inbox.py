"""Typed messages over the board: `post` writes one, an `Inbox` reads a topic in order and drops malformed messages."""

from __future__ import annotations

from typing import Generic, TypeVar

import structlog
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from async_rl.protocols import Board

_READ_WAIT_S = 5.0
"""How long one read waits. A message ends the wait at once, so this only bounds an idle round trip."""

_log = structlog.get_logger(__name__)

M = TypeVar("M")


class BoardMessage(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


async def post(board: Board, topic: str, message: BoardMessage) -> None:
    await board.post(topic, message.model_dump(mode="json"))


class Inbox(Generic[M]):
    """Reads a topic in order; no message is missed between two reads."""

    def __init__(self, board: Board, topic: str, messages: type[M] | TypeAdapter[M], position: str) -> None:
        self._board = board
        self._topic = topic
        self._messages = messages if isinstance(messages, TypeAdapter) else TypeAdapter(messages)
        self._position = position
        self.num_ignored = 0
        """Malformed messages so far."""

    @classmethod
    async def open(cls, board: Board, topic: str, messages: type[M] | TypeAdapter[M], *, from_start: bool = False) -> Inbox[M]:
        """Read messages of a type from now on; `from_start`: begin with those that Redis still keeps."""
        if from_start:
            return cls(board, topic, messages, "0")
        # "$" would mean a different position at each read, and messages between two reads would be lost.
        kept = await board.read(topic, "0", 0.0)
        return cls(board, topic, messages, kept[-1][0] if kept else "0")

    async def read(self) -> list[M]:
        """The next messages; empty when none came within `_READ_WAIT_S`."""
        entries = await self._board.read(self._topic, self._position, _READ_WAIT_S)
        if entries:
            self._position = entries[-1][0]
        found: list[M] = []
        for position, raw in entries:
            try:
                found.append(self._messages.validate_python(raw))
            except ValidationError as error:
                self.num_ignored += 1
                if self.num_ignored == 1:  # log once: there may be a million
                    problem = str(error).partition("\n")[0]
                    _log.warning("ignored malformed messages", topic=self._topic, position=position, problem=problem)
        return found
