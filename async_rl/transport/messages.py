"""Messages between sender and receivers on the board. Data only; malformed ones are ignored and logged.

to workers:  PushOffer -> PushBegin -> (PushCancel)   then VersionLive, once the version is live
to learner:  WorkerHello;   PushReady | PushRefused -> PushStaged | PushFailed;   WorkerLeft
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from async_rl.board.inbox import BoardMessage
from async_rl.types import VersionRecord

Backend = Literal["nccl", "gloo"]
"""Backend of an attempt's process groups. gloo moves tensors of GPUs through pinned host memory."""

TO_WORKERS = "weights-to-workers"
TO_LEARNER = "weights-to-learner"


class _PushMessage(BoardMessage):
    fence: int
    """The sender's fencing token: messages with an older one come from a learner that was replaced."""
    generation: int
    """Number of the sender's attempt; every attempt has its own process groups."""

    @property
    def attempt(self) -> tuple[int, int]:
        return self.fence, self.generation


class PushOffer(_PushMessage):
    """Offers a version to some workers. Where its parcels are stands on the board (packed_source.py)."""

    kind: Literal["offer"] = "offer"
    to: tuple[str, ...]
    record: VersionRecord


class ParcelGroup(BaseModel):
    """The process group that carries one parcel to every worker that does not read it from the sender's memory."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    parcel: int
    group: str
    members: tuple[str, ...]
    """The sender has rank 0, the i-th member rank i + 1."""
    base: int
    """The version that every member holds, so that a delta may be sent; -1: there is none, the parcel is sent whole."""


class PushBegin(_PushMessage):
    """Starts the transfer to the members listed, all of which are ready."""

    kind: Literal["begin"] = "begin"
    members: tuple[str, ...]
    groups: tuple[ParcelGroup, ...]
    backend: Backend
    transfer_bytes: int


class PushCancel(_PushMessage):
    """The attempt failed: give it up and reply with PushFailed."""

    kind: Literal["cancel"] = "cancel"


class VersionLive(BoardMessage):
    """The version is live: serve it."""

    kind: Literal["flip"] = "flip"
    fence: int
    record: VersionRecord


class WorkerHello(BoardMessage):
    """The worker started, or missed a version: forget what was known of it and send what it lacks."""

    kind: Literal["hello"] = "hello"
    member: str


class WorkerLeft(BoardMessage):
    """The worker ends and will not reply any more."""

    kind: Literal["left"] = "left"
    member: str


class _Reply(_PushMessage):
    member: str


class PushReady(_Reply):
    """The worker takes the offered version."""

    kind: Literal["ready"] = "ready"
    by_memory: tuple[int, ...]
    """Parcels that it reads in place, from the sender's memory on the same machine."""
    holds: str = ""
    """Digest of the version whose parcels it still has unchanged, to which a delta may be sent; empty: none."""
    is_short_of_descriptors: bool = False
    """File descriptors run out. Process groups are then built anew, which closes connections left from earlier ones."""


class PushRefused(_Reply):
    kind: Literal["refused"] = "refused"
    reason: str


class PushStaged(_Reply):
    """All parcels arrived and their digests match."""

    kind: Literal["staged"] = "staged"


class PushFailed(_Reply):
    kind: Literal["failed"] = "failed"
    reason: str
    is_cut_off: bool = False
    """The member does not reach the learner's machine, which explains why others in its group failed too."""


ToWorkers = PushOffer | PushBegin | PushCancel | VersionLive
Reply = PushReady | PushRefused | PushStaged | PushFailed
ToLearner = WorkerHello | WorkerLeft | Reply

TO_WORKERS_MESSAGES: TypeAdapter[ToWorkers] = TypeAdapter(Annotated[ToWorkers, Field(discriminator="kind")])
TO_LEARNER_MESSAGES: TypeAdapter[ToLearner] = TypeAdapter(Annotated[ToLearner, Field(discriminator="kind")])
