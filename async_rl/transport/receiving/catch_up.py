"""Fetches the live version without a push, for a worker that started late or missed one. Ways, in order of preference:

    1. the learner's memory, if all parcels are on this machine
    2. a snapshot of the live version, which needs no learner
    3. the learner's ranks over HTTP
    otherwise wait for the learner's next push

The order is by the load on other processes. Every way is verified against the digest of the version's record.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from async_rl.transport.receiving.placement import Placement
from async_rl.transport.wire.http import pull
from async_rl.types import VersionRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class CatchUp:
    """Everything here blocks; call it on a thread."""

    specs: Sequence[ParameterSpec]
    """The parameters as they are sent (`wire.dtype`)."""
    placement: Placement
    wire: WireConfig
    store: Store
    snapshots: Path | None

    def check_model(self, source: PackedSource | None) -> None:
        """While no version is live: raise FleetMismatch when the learner, if there is one, trains another model."""
        if source is not None:
            self.new_receiver().check_model(source.layout)

    def fetch(self, live: VersionRecord, source: PackedSource | None, abandoned: Event) -> tuple[ReceivedVersion, str]:
        """Fetch the live version; returns it and a name for the way it came. `abandoned`: set it to stop the fetch.

        Raises WireError when all ways fail, FleetMismatch when the version is another model's.
        """
        receiver = self.new_receiver()
        ways: dict[str, Callable[[], _Way]] = {
            "the learner's memory": lambda: self._from_memory(receiver, live, source),
            "a snapshot": lambda: self._from_snapshot(receiver, live),
            "the learner": lambda: self._over_http(receiver, live, source, abandoned),
        }
        problems: list[str] = []
        for name, find in ways.items():
            try:
                expected, fetch_parcel = find()
                try:
                    return receiver.fetch(expected, fetch_parcel), name
                except WireError:
                    expected.unlock()
                    raise
            except WireError as error:
                problems.append(f"{name}: {error}")
        raise WireError("; ".join(problems))

    def new_receiver(self) -> ParcelReceiver:
        """A new receiver for each fetch: threads of an abandoned one must not disturb pushes or later fetches."""
        return ParcelReceiver(self.specs, self.placement, self.wire, self.store)

    def _from_memory(self, receiver: ParcelReceiver, live: VersionRecord, source: PackedSource | None) -> _Way:
        expected = _expect(receiver, live, source)
        if len(expected.mapped) < len(expected.packed):
            expected.unlock()
            raise WireError("not all parcels are on this machine")
        return expected, lambda _number, _data, _on_received: None

    def _from_snapshot(self, receiver: ParcelReceiver, live: VersionRecord) -> _Way:
        root = self.snapshots
        manifest = snapshot.read_manifest(root, live.version) if root is not None else None
        if root is None or manifest is None:
            raise WireError(f"there is none of version {live.version}")
        packed = tuple(PackedParcel(chunks=chunks, address="", url="") for chunks in manifest.chunks)
        return receiver.expect_from_snapshot(live, manifest.layout, packed), partial(snapshot.read_parcel, root, manifest)

    def _over_http(self, receiver: ParcelReceiver, live: VersionRecord, source: PackedSource | None, abandoned: Event) -> _Way:
        expected = _expect(receiver, live, source)
        part_bytes, timeout_s = int(self.wire.bucket_mb * (1 << 20)), self.wire.operation_timeout_s

        def fetch_parcel(number: int, data: torch.Tensor, on_received: OnReceived) -> None:
            pull(expected.packed[number].url, live.version, data, part_bytes, timeout_s, abandoned, on_received)

        return expected, fetch_parcel


_Way = tuple[ExpectedVersion, FetchParcel]


def _expect(receiver: ParcelReceiver, live: VersionRecord, source: PackedSource | None) -> ExpectedVersion:
    if source is None:
        raise WireError("no learner has published an address")
    return receiver.expect_from_learner(live, source)
