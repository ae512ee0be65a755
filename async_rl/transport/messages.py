"""What sender and receivers say to each other on the board. Data only; what is malformed is ignored and logged.

to workers:  PushOffer -> PushBegin -> (PushCancel)   then VersionLive, once the version is live
to learner:  WorkerHello;   PushReady | PushRefused -> PushStaged | PushFailed;   WorkerLeft
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from async_rl.board.inbox import BoardMessage
from async_rl.types import VersionRecord

Backend = Literal["nccl", "gloo"]
"""What the attempt's process group is made of. gloo moves the tensors of GPUs through pinned host memory."""

TO_WORKERS = "weights-to-workers"
TO_LEARNER = "weights-to-learner"


class _OfPush(BoardMessage):
    fence: int
    """The sender's incarnation: of two learners, the one with the higher fence is the learner."""
    generation: int
    """Counts the sender's attempts; each has its own process group."""

    @property
    def attempt(self) -> tuple[int, int]:
        return self.fence, self.generation


class PushOffer(_OfPush):
    """Will you take this version? What was packed of it is on the board (packed_source.py)."""

    kind: Literal["offer"] = "offer"
    to: tuple[str, ...]
    record: VersionRecord


class ParcelGroup(BaseModel):
    """Who gets a parcel over a process group: everybody who does not read it from the sender's memory."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    parcel: int
    group: str
    members: tuple[str, ...]
    """The sender has rank 0, the i-th member rank i + 1."""
    base: int
    """The version that all of them hold, to which a difference may come; -1 if there is none, and the parcel comes whole."""


class PushBegin(_OfPush):
    """Everybody listed is ready: take the parcels."""

    kind: Literal["begin"] = "begin"
    members: tuple[str, ...]
    wires: tuple[ParcelGroup, ...]
    backend: Backend
    transfer_bytes: int


class PushCancel(_OfPush):
    """The attempt broke: let go of it and say so."""

    kind: Literal["cancel"] = "cancel"


class VersionLive(BoardMessage):
    """The version is live: serve it."""

    kind: Literal["flip"] = "flip"
    fence: int
    record: VersionRecord


class WorkerHello(BoardMessage):
    """I started, or I missed a version: send me what I lack, whatever you knew of me before."""

    kind: Literal["hello"] = "hello"
    member: str


class WorkerLeft(BoardMessage):
    """I am gone: wait for no answer of mine."""

    kind: Literal["left"] = "left"
    member: str


class _Reply(_OfPush):
    member: str


class PushReady(_Reply):
    kind: Literal["ready"] = "ready"
    by_memory: tuple[int, ...]
    """The parcels that it reads where they lie, on the sender's machine."""
    holds: str = ""
    """The digest of the version that lies unchanged in its own memory, to which a difference may be sent."""
    is_short_of_descriptors: bool = False
    """So its process groups are built anew: whatever connected to the old ones while they formed goes with them."""


class PushRefused(_Reply):
    kind: Literal["refused"] = "refused"
    reason: str


class PushStaged(_Reply):
    """Everything arrived and is what was published."""

    kind: Literal["staged"] = "staged"


class PushFailed(_Reply):
    kind: Literal["failed"] = "failed"
    reason: str


ToWorkers = PushOffer | PushBegin | PushCancel | VersionLive
Reply = PushReady | PushRefused | PushStaged | PushFailed
ToLearner = WorkerHello | WorkerLeft | Reply

TO_WORKERS_MESSAGES: TypeAdapter[ToWorkers] = TypeAdapter(Annotated[ToWorkers, Field(discriminator="kind")])
TO_LEARNER_MESSAGES: TypeAdapter[ToLearner] = TypeAdapter(Annotated[ToLearner, Field(discriminator="kind")])
