"""One learner rank's end of the wire: every rank packs and sends its own parcel, on orders of rank 0.

    rank 0                                                        rank k
    pack_parcel                                                   pack_parcel
    begin_digest ◀─────── PackedParcel, over the run's store ──── begin_digest
    run_orders, write_snapshot ── orders, over the run's store ──▶ follow_orders

Packing is a copy on the model's thread, between two steps; everything else happens on other threads, during training. Every
rank also serves its packed parcels to workers that pull them (wire/http.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from threading import Event, Lock

import torch

from async_rl.config import WireConfig
from async_rl.errors import WireError
from async_rl.supervision.liveness.daemon_thread import start_daemon_thread
from async_rl.transport import snapshot
from async_rl.transport.delta.parcel_delta import Encoding, encoding_of, split_parcel
from async_rl.transport.digest import version_digest
from async_rl.transport.gpu_stream import transport_stream
from async_rl.transport.packed_source import PackedParcel
from async_rl.transport.packed_versions import HeldBoxes, PackedVersions
from async_rl.transport.parcel_transfer import ParcelSender
from async_rl.transport.plan import WireLayout
from async_rl.transport.sending.rank_orders import WireOrder, WireOrders, WriteParcel
from async_rl.transport.wire.gpus import gpu_of
from async_rl.transport.wire.http import ParcelServer
from async_rl.transport.wire.process_group import GroupPlace, LinkPool
from async_rl.transport.wire.rendezvous import WireRendezvous
from async_rl.types import VersionRecord

_CLOSE_S = 5.0
"""Time for threads that talk to the other ranks to notice that the sender is closed."""


class RankSender:
    """Call `pack_parcel` on the thread that owns the model."""

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
        self._rendezvous, self._orders, self._rank = rendezvous, orders, rank
        self._device = device
        self.deltas: Encoding = encoding_of(device)
        """Encoding of the deltas that this rank can send."""
        self._wire = wire
        self._parcel_number = next((number for number, parcel in enumerate(layout.parcels) if parcel.sender == rank), None)
        self._versions: PackedVersions | None = None
        if self._parcel_number is not None:
            self._versions = PackedVersions(layout, layout.parcels[self._parcel_number], device, shared=wire.shared_memory)
            pieces = split_parcel(layout, layout.parcels[self._parcel_number], self.deltas)
            self._parcel_sender = ParcelSender(self._versions, pieces, wire)
            self._server = ParcelServer(rendezvous.address, self._versions.open_version, wire.operation_timeout_s)
        self.snapshots = snapshots
        """Folder for snapshots of live versions; None: no snapshots."""
        self._links = LinkPool(wire)
        self._closed = Event()
        self.packed: Mapping[int, tuple[PackedParcel, ...]] = {}
        """For each version all parcels; filled on rank 0 only. Replaced, never changed: other threads read it."""
        self._kept: frozenset[int] = frozenset()
        """The versions that can be sent."""
        self._registering = Lock()
        self._digesting: set[Future[str]] = set()

    def pack_parcel(self, version: int, held: HeldBoxes, *, keep: Collection[int] = ()) -> None:
        """Copy this rank's parcel of a version. Of earlier versions, only those in `keep` can still be sent."""
        self._kept = frozenset({version, *keep})
        if self._versions is not None:
            self._versions.add(version, held, keep=keep)

    def begin_digest(self, version: int) -> Future[str]:
        """Hash this rank's parcel of a packed version on a thread. Call it on every rank.

        Rank 0's future has the version's digest, for `VersionRecord.digest`, once the ranks have hashed all parcels; then the
        version can be sent. Its exception is a WireError when a rank failed, or newer versions have replaced this one.
        """
        digesting = start_daemon_thread(lambda: self._digest(version), name="weight-digest")
        self._digesting = {each for each in self._digesting if not each.done()} | {digesting}
        return digesting

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
        wait(self._digesting, _CLOSE_S)  # a process that ends while one of its threads uses the store is aborted
        if self._versions is not None:
            self._server.close()
        self._links.close()

    # -- every rank ----------------------------------------------------------------------------------------------------

    def _is_wanted(self, version: int) -> bool:
        return version in self._kept and not self._closed.is_set()

    def _digest(self, version: int) -> str:
        is_wanted = partial(self._is_wanted, version)
        if self._rank > 0:
            if self._versions is not None:
                self._orders.tell_parcel(version, _or_problem(partial(self._describe, version, self._versions)), is_wanted)
            return ""
        own = self._describe(version, self._versions) if self._versions is not None else None
        parcels = tuple(
            own if own is not None and parcel.sender == 0 else self._orders.wait_for_parcel(version, parcel.sender, is_wanted)
            for parcel in self.layout.parcels
        )
        with self._registering:
            known = {**self.packed, version: parcels}
            self.packed = {each: known[each] for each in known if each in self._kept}
        return version_digest(self.layout.digest, [each.chunks for each in parcels])

    def _describe(self, version: int, versions: PackedVersions) -> PackedParcel:
        chunks, address = versions.describe(version)
        return PackedParcel(chunks=chunks, address=address, url=self._server.url, gpu=gpu_of(self._device))

    def _run_order(self, order: WireOrder, abandoned: Event) -> None:
        if isinstance(order, WriteParcel):
            self._write_parcel(order)
            return
        place = GroupPlace(group=order.group, rank=0, size=order.size, device=self._device, backend=order.backend)
        self._links.keep_only({order.group})
        with transport_stream(self._device), self._links.use(self._rendezvous, place, abandoned) as link:
            self._parcel_sender.send(link, order.version, order.base, may_be_delta=order.deltas == self.deltas)

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


def _or_problem(describe: Callable[[], PackedParcel]) -> PackedParcel | str:
    try:
        return describe()
    except Exception as error:  # rank 0 raises it
        return f"{type(error).__name__}: {error}"
