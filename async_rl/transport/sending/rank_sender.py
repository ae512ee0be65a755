"""One learner rank's end of the wire: every rank packs and sends its own parcel, on orders of rank 0.

    rank 0                                                        rank k
    pack_parcel                                                   pack_parcel
    register_version ◀───── PackedParcel, gathered by the learner ─────┘
    run_orders, write_snapshot ── orders, over the run's store ──▶ follow_orders

Packing happens on the model's thread between two steps; everything else on other threads, during training. Every rank also
serves its packed parcels to workers that pull them (wire/http.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from threading import Event

import torch

from async_rl.config import WireConfig
from async_rl.errors import WireError
from async_rl.transport import snapshot
from async_rl.transport.delta.parcel_delta import split_parcel
from async_rl.transport.digest import version_digest
from async_rl.transport.packed_source import PackedParcel
from async_rl.transport.packed_versions import HeldBoxes, PackedVersions
from async_rl.transport.parcel_transfer import ParcelSender
from async_rl.transport.plan import WireLayout
from async_rl.transport.sending.rank_orders import WireOrder, WireOrders, WriteParcel
from async_rl.transport.wire.http import ParcelServer
from async_rl.transport.wire.process_group import GroupPlace, LinkPool
from async_rl.transport.wire.rendezvous import WireRendezvous
from async_rl.types import VersionRecord


class RankSender:
    """Call `pack_parcel` and `register_version` on the thread that owns the model, everything else on others."""

    def __init__(
        self,
        rendezvous: WireRendezvous,
        orders: WireOrders,
        layout: WireLayout,
        rank: int,
        device: torch.device,
        wire: WireConfig,
        *,
        snapshots: Path | None = None,
    ) -> None:
        self.layout = layout
        self._rendezvous, self._orders = rendezvous, orders
        self._device = device
        self._wire = wire
        self._parcel_number = next((number for number, parcel in enumerate(layout.parcels) if parcel.sender == rank), None)
        self._versions: PackedVersions | None = None
        if self._parcel_number is not None:
            self._versions = PackedVersions(layout, layout.parcels[self._parcel_number], device, shared=wire.shared_memory)
            self._parcel_sender = ParcelSender(self._versions, split_parcel(layout, layout.parcels[self._parcel_number]), wire)
            self._server = ParcelServer(rendezvous.address, self._versions.open_version, wire.operation_timeout_s)
        self.snapshots = snapshots
        """Folder for snapshots of live versions; None: no snapshots."""
        self._links = LinkPool(wire)
        self._closed = Event()
        self.packed: Mapping[int, tuple[PackedParcel, ...]] = {}
        """For each version all parcels; filled on rank 0 only. Replaced, never changed: other threads read it."""

    def pack_parcel(self, version: int, held: HeldBoxes, *, keep: Collection[int] = ()) -> PackedParcel | None:
        """Copy this rank's parcel of a version. Of earlier versions, only those in `keep` can still be sent.

        Returns what rank 0 needs for `register_version`; None on a rank that sends nothing.
        """
        if self._versions is None:
            return None
        chunks, address = self._versions.add(version, held, keep=keep)
        return PackedParcel(chunks=chunks, address=address, url=self._server.url)

    def parcel(self, version: int) -> torch.Tensor:
        assert self._versions is not None
        return self._versions.parcel(version)

    @property
    def num_deltas(self) -> int:
        """Deltas that this rank has sent instead of whole parcels."""
        return self._parcel_sender.num_deltas

    def follow_orders(self) -> None:
        """For ranks above 0: carry out rank 0's orders on background threads, until `close`."""
        self._orders.follow(self._parcel_number, lambda order: self._run_order(order, self._closed))

    # -- rank 0 --------------------------------------------------------------------------------------------------------

    def register_version(self, version: int, packed: Sequence[PackedParcel | None], *, keep: Collection[int] = ()) -> str:
        """Make a version known that all ranks have packed; returns its digest, for `VersionRecord.digest`.

        `packed`: what each rank's `pack_parcel` returned, in rank order.
        """
        parcels = tuple(each for each in packed if each is not None)
        self.packed = {known: each for known, each in self.packed.items() if known in keep} | {version: parcels}
        return version_digest(self.layout.digest, [each.chunks for each in parcels])

    def write_snapshot(self, record: VersionRecord) -> None:
        """Write a snapshot of a packed version, with the other ranks' help; blocks. Raises WireError when that fails."""
        assert self.snapshots is not None
        parcels = self.packed.get(record.version)
        if parcels is None:
            raise WireError(f"version {record.version} has been given up for newer ones")
        try:
            with snapshot.drafting(self.snapshots, record.version) as draft:
                orders = [WriteParcel(parcel=parcel, version=record.version) for parcel in range(len(parcels))]
                self.run_orders(orders, self._closed)
                chunks = tuple(each.chunks for each in parcels)
                snapshot.commit(draft, snapshot.SnapshotManifest(record=record, layout=self.layout, chunks=chunks))
        except OSError as error:
            raise WireError(f"cannot write to {self.snapshots}: {error.strerror}") from error

    def run_orders(self, orders: Sequence[WireOrder], abandoned: Event, *, in_turn: bool = False) -> None:
        """Carry out orders on all ranks, concurrently or one after the other; blocks until all are done.

        Raises WireError when one failed; `in_turn`, those after it are not begun.
        """
        for together in [[order] for order in orders] if in_turn else [orders]:
            self._run_together(together, abandoned)

    def _run_together(self, orders: Sequence[WireOrder], abandoned: Event) -> None:
        others = [order for order in orders if self._sender(order) != 0]
        number = self._orders.post(others) if others else -1
        for order in orders:
            if self._sender(order) == 0:
                self._run_order(order, abandoned)
        for sender in {self._sender(order) for order in others}:
            self._orders.wait_for_result(number, sender, self._wire.rendezvous_timeout_s)

    def close(self) -> None:
        self._closed.set()
        self._orders.close()
        if self._versions is not None:
            self._server.close()
        self._links.close()

    # -- every rank ----------------------------------------------------------------------------------------------------

    def _run_order(self, order: WireOrder, abandoned: Event) -> None:
        if isinstance(order, WriteParcel):
            self._write_parcel(order)
            return
        place = GroupPlace(group=order.group, rank=0, size=order.size, device=self._device, backend=order.backend)
        self._links.keep_only({order.group})
        with self._links.use(self._rendezvous, place, abandoned) as link:
            self._parcel_sender.send(link, order.version, order.base)

    def _write_parcel(self, order: WriteParcel) -> None:
        """Write to the folder of this rank's configuration: an order names a version, never a path."""
        if self._versions is None or self.snapshots is None:
            raise WireError("this rank's configuration names no folder for snapshots (wire.snapshots)")
        try:
            with self._versions.open_version(order.version) as data:
                snapshot.write_parcel(snapshot.draft_of(self.snapshots, order.version), order.parcel, self.layout, data)
        except OSError as error:
            raise WireError(f"cannot write to {self.snapshots}: {error.strerror}") from error

    def _sender(self, order: WireOrder) -> int:
        return self.layout.parcels[order.parcel].sender
