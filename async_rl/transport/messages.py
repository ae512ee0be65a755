"""What sender and receivers say to each other on the board. Data only; what is malformed is ignored and logged.

to workers:  Offer -> Begin -> (Cancel)   then Flip, once the version is live
to learner:  Hello;   Ready | Refused -> Staged | Failed;   Left
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Generic, Literal, TypeVar

import structlog
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from async_rl.protocols import Board
from async_rl.types import VersionRecord

Backend = Literal["nccl", "gloo"]
"""What the attempt's process group is made of. gloo moves the tensors of GPUs through pinned host memory."""

TO_WORKERS = "weights-to-workers"
TO_LEARNER = "weights-to-learner"

_READ_WAIT_S = 5.0
"""How long one read waits; a message ends the wait at once, so this only bounds an idle round trip."""

_log = structlog.get_logger(__name__)


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _OfPush(_Message):
    fence: int
    """The sender's incarnation: of two learners, the one with the higher fence is the learner."""
    generation: int
    """Counts the sender's attempts; each has its own process group."""

    @property
    def attempt(self) -> tuple[int, int]:
        return self.fence, self.generation


class Offer(_OfPush):
    """Will you take this version? What was packed of it is on the board (source.py)."""

    kind: Literal["offer"] = "offer"
    to: tuple[str, ...]
    record: VersionRecord


class Wire(BaseModel):
    """Who gets a parcel over a process group: everybody who does not read it from the sender's memory."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    parcel: int
    group: str
    members: tuple[str, ...]
    """The sender has rank 0, the i-th member rank i + 1."""
    base: int
    """The version that all of them hold, to which a difference may come; -1 if there is none, and the parcel comes whole."""


class Begin(_OfPush):
    """Everybody listed is ready: take the parcels."""

    kind: Literal["begin"] = "begin"
    members: tuple[str, ...]
    wires: tuple[Wire, ...]
    backend: Backend
    transfer_bytes: int


class Cancel(_OfPush):
    """The attempt broke: let go of it and say so."""

    kind: Literal["cancel"] = "cancel"


class Flip(_Message):
    """The version is live: serve it."""

    kind: Literal["flip"] = "flip"
    fence: int
    record: VersionRecord


class Hello(_Message):
    """I started, or I missed a version: send me what I lack, whatever you knew of me before."""

    kind: Literal["hello"] = "hello"
    member: str


class Left(_Message):
    """I am gone: wait for no answer of mine."""

    kind: Literal["left"] = "left"
    member: str


class _Reply(_OfPush):
    member: str


class Ready(_Reply):
    kind: Literal["ready"] = "ready"
    by_memory: tuple[int, ...]
    """The parcels that it reads where they lie, on the sender's machine."""
    holds: str = ""
    """The digest of the version that lies unchanged in its own memory, to which a difference may be sent."""
    is_short_of_descriptors: bool = False
    """So its process groups are built anew: whatever connected to the old ones while they formed goes with them."""


class Refused(_Reply):
    kind: Literal["refused"] = "refused"
    reason: str


class Staged(_Reply):
    """Everything arrived and is what was published."""

    kind: Literal["staged"] = "staged"


class Failed(_Reply):
    kind: Literal["failed"] = "failed"
    reason: str


ToWorkers = Offer | Begin | Cancel | Flip
Reply = Ready | Refused | Staged | Failed
ToLearner = Hello | Left | Reply

TO_WORKERS_MESSAGES: TypeAdapter[ToWorkers] = TypeAdapter(Annotated[ToWorkers, Field(discriminator="kind")])
TO_LEARNER_MESSAGES: TypeAdapter[ToLearner] = TypeAdapter(Annotated[ToLearner, Field(discriminator="kind")])

M = TypeVar("M")


async def post(board: Board, topic: str, message: _Message) -> None:
    await board.post(topic, message.model_dump(mode="json"))


class Inbox(Generic[M]):
    """A topic in order, nothing missed between two reads."""

    def __init__(self, board: Board, topic: str, messages: TypeAdapter[M], position: str) -> None:
        self._board = board
        self._topic = topic
        self._messages = messages
        self._position = position
        self.num_ignored = 0
        """Malformed messages so far."""

    @classmethod
    async def open(cls, board: Board, topic: str, messages: TypeAdapter[M], *, from_start: bool = False) -> Inbox[M]:
        """From now on; `from_start`: beginning with the messages that are kept."""
        if from_start:
            return cls(board, topic, messages, "0")
        # "$" would mean a different place at each read, and whatever came between two reads would be lost.
        kept = await board.read(topic, "0", 0.0)
        return cls(board, topic, messages, kept[-1][0] if kept else "0")

    async def read(self) -> list[M]:
        """The next messages; empty when none came for a while."""
        entries = await self._board.read(self._topic, self._position, _READ_WAIT_S)
        if entries:
            self._position = entries[-1][0]
        return self._valid(entries)

    def _valid(self, entries: Sequence[tuple[str, Mapping[str, Any]]]) -> list[M]:
        found: list[M] = []
        for position, raw in entries:
            try:
                found.append(self._messages.validate_python(raw))
            except ValidationError as error:
                self.num_ignored += 1
                if self.num_ignored == 1:  # who writes one may write a million
                    problem = str(error).partition("\n")[0]
                    _log.warning("ignores malformed messages", topic=self._topic, position=position, problem=problem)
        return found
