"""Fetches the live version without a push, for a worker that started late or missed one. Ways, in order of preference:

    1. the learner's memory, if all parcels are on this machine
    2. a snapshot of the live version, which needs no learner
    3. the learner's ranks over HTTP
    otherwise wait for the learner's next push

The order is by the load on other processes. Every way is verified against the digest of the version's record.
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
from async_rl.transport.receiving.parcel_receiver import (
    ExpectedVersion,
    FetchParcel,
    OnReceived,
    ParcelReceiver,
    ReceivedVersion,
)
from async_rl.transport.wire.http import pull
from async_rl.transport.wire.process_group import WireTimeouts
from async_rl.types import VersionRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class CatchUp:
    """Everything here blocks; call it on a thread."""

    specs: Sequence[ParameterSpec]
    """The parameters as they are sent (`wire.dtype`)."""
    device: torch.device
    wire: WireConfig
    store: Store
    snapshots: Path | None

    def check_model(self, source: PackedSource | None) -> None:
        """While no version is live: raise FleetMismatch when the learner, if there is one, trains another model."""
        if source is not None:
            with suppress(WireError):  # it may be unreachable
                self.new_receiver().check_model(source)

    def fetch(self, live: VersionRecord, source: PackedSource | None, abandoned: Event) -> tuple[ReceivedVersion, str]:
        """Fetch the live version; returns it and a name for the way it came. `abandoned`: set it to stop the fetch.

        Raises WireError when all ways fail, FleetMismatch when the version is another model's.
        """
        fetch = _Fetch(self, live, source, abandoned)
        ways = {
            "the learner's memory": fetch.from_memory,
            "a snapshot": fetch.from_snapshot,
            "the learner": fetch.over_http,
        }
        problems: list[str] = []
        for name, way in ways.items():
            try:
                return way(), name
            except WireError as error:
                problems.append(f"{name}: {error}")
        raise WireError("; ".join(problems))

    def new_receiver(self) -> ParcelReceiver:
        """A new receiver for each fetch: threads of an abandoned one must not disturb pushes or later fetches."""
        timeouts = WireTimeouts(rendezvous_s=self.wire.rendezvous_timeout_s, operation_s=self.wire.operation_timeout_s)
        return ParcelReceiver(self.specs, self.device, timeouts, self.store)


class _Fetch:
    def __init__(self, to: CatchUp, live: VersionRecord, source: PackedSource | None, abandoned: Event) -> None:
        self._to, self._live, self._source, self._abandoned = to, live, source, abandoned
        self._timeout_s = to.wire.operation_timeout_s
        self._receiver = to.new_receiver()

    def from_memory(self) -> ReceivedVersion:
        expected = self._expect()
        if len(expected.mapped) < len(expected.packed):
            expected.unlock()
            raise WireError("not all parcels are on this machine")
        return self._fetch(expected, lambda *_: None)

    def from_snapshot(self) -> ReceivedVersion:
        root = self._to.snapshots
        manifest = snapshot.read_manifest(root, self._live.version) if root is not None else None
        if root is None or manifest is None:
            raise WireError(f"there is none of version {self._live.version}")
        packed = tuple(PackedParcel(chunks=chunks, address="", url="") for chunks in manifest.chunks)
        expected = self._receiver.expect_from_snapshot(self._live, manifest.layout, packed)
        return self._fetch(expected, partial(snapshot.read_parcel, root, manifest))

    def over_http(self) -> ReceivedVersion:
        expected = self._expect()
        part_bytes = int(self._to.wire.bucket_mb * (1 << 20))

        def fetch_parcel(number: int, data: torch.Tensor, on_received: OnReceived) -> None:
            url, version = expected.packed[number].url, self._live.version
            pull(url, version, data, part_bytes, self._timeout_s, self._abandoned, on_received)

        return self._fetch(expected, fetch_parcel)

    def _expect(self) -> ExpectedVersion:
        if self._source is None:
            raise WireError("no learner has published an address")
        return self._receiver.expect_from_learner(self._live, self._source)

    def _fetch(self, expected: ExpectedVersion, fetch_parcel: FetchParcel) -> ReceivedVersion:
        try:
            return self._receiver.fetch(expected, fetch_parcel)
        except WireError:
            expected.unlock()
            raise
