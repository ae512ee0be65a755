"""How a worker that lacks the live version comes by it without the learner's doing: it started late, or missed a push.

    1. the learner's memory, when all of it is on this machine
    2. a snapshot, when there is one of the live version: also while there is no learner
    3. the learner's ranks over HTTP
    else the learner's next push

What is easier on the others comes first. Wherever the version comes from, its record says what it must be.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event

import torch
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from async_rl.config import WireConfig
from async_rl.errors import WireError
from async_rl.models.parameter_spec import ParameterSpec
from async_rl.transport import snapshot
from async_rl.transport.packed_source import PackedParcel, PackedSource
from async_rl.transport.receiving.intake import ExpectedVersion, FetchParcel, OnReceived, ParcelReceiver, ReceivedVersion
from async_rl.transport.wire.http import pull
from async_rl.transport.wire.process_group import WireTimeouts
from async_rl.types import VersionRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class CatchUp:
    """Everything here blocks; it is called on a thread."""

    specs: Sequence[ParameterSpec]
    """As they travel."""
    device: torch.device
    wire: WireConfig
    store: Store
    snapshots: Path | None

    def check(self, source: PackedSource | None) -> None:
        """While nothing is live. Raises FleetMismatch when there is a learner, and it trains another model."""
        if source is not None:
            with suppress(WireError):  # it may be out of reach
                self.intake().meet(source)

    def fetch(self, live: VersionRecord, source: PackedSource | None, released: Event) -> tuple[ReceivedVersion, str]:
        """The version, and where it came from. Raises WireError when there is no way, FleetMismatch when it is another model's.

        `released` is set when nobody waits for it any more.
        """
        fetching = _Fetching(self, live, source, released)
        ways = {
            "the learner's memory": fetching.in_place,
            "a snapshot": fetching.from_snapshot,
            "the learner": fetching.over_http,
        }
        problems: list[str] = []
        for name, way in ways.items():
            try:
                return way(), name
            except WireError as error:
                problems.append(f"{name}: {error}")
        raise WireError("; ".join(problems))

    def intake(self) -> ParcelReceiver:
        """A new one: what is left behind by one that is given up must disturb neither pushes nor other tries."""
        timeouts = WireTimeouts(rendezvous_s=self.wire.rendezvous_timeout_s, operation_s=self.wire.operation_timeout_s)
        return ParcelReceiver(self.specs, self.device, timeouts, self.store)


class _Fetching:
    def __init__(self, to: CatchUp, live: VersionRecord, source: PackedSource | None, released: Event) -> None:
        self._to, self._live, self._source, self._released = to, live, source, released
        self._timeout_s = to.wire.operation_timeout_s
        self._intake = to.intake()

    def in_place(self) -> ReceivedVersion:
        expected = self._as_the_learner_says()
        if len(expected.mapped) < len(expected.packed):
            expected.let_go()
            raise WireError("not all of it is on this machine")
        return self._fetch(expected, lambda *_: None)

    def from_snapshot(self) -> ReceivedVersion:
        root = self._to.snapshots
        manifest = snapshot.read_manifest(root, self._live.version) if root is not None else None
        if root is None or manifest is None:
            raise WireError(f"there is none of version {self._live.version}")
        packed = tuple(PackedParcel(chunks=chunks, address="", url="") for chunks in manifest.chunks)
        expected = self._intake.expect_as_told(self._live, manifest.layout, packed)
        return self._fetch(expected, partial(snapshot.read_parcel, root, manifest))

    def over_http(self) -> ReceivedVersion:
        expected = self._as_the_learner_says()
        part_bytes = int(self._to.wire.bucket_mb * (1 << 20))

        def take(number: int, data: torch.Tensor, landed: OnReceived) -> None:
            pull(expected.packed[number].url, self._live.version, data, part_bytes, self._timeout_s, self._released, landed)

        return self._fetch(expected, take)

    def _as_the_learner_says(self) -> ExpectedVersion:
        if self._source is None:
            raise WireError("none has said where it is")
        return self._intake.expect(self._live, self._source)

    def _fetch(self, expected: ExpectedVersion, take: FetchParcel) -> ReceivedVersion:
        try:
            return self._intake.fetch(expected, take)
        except WireError:
            expected.let_go()
            raise
