"""Which way a worker takes to a live version that it lacks, with a learner of two ranks in one process."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from errno import EMFILE
from itertools import count
from pathlib import Path
from threading import Event

import pytest
import torch
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from async_rl.config import WireConfig
from async_rl.errors import FleetMismatch, WireError
from async_rl.megatron import compat
from async_rl.models.parameter_spec import ParameterSpec
from async_rl.transport.messages import ParcelGroup, PushBegin
from async_rl.transport.packed_source import PackedSource
from async_rl.transport.plan import Box, plan_layout
from async_rl.transport.receiving import parcel_receiver
from async_rl.transport.receiving.catch_up import CatchUp
from async_rl.transport.receiving.parcel_receiver import ParcelReceiver
from async_rl.transport.receiving.placement import Placement
from async_rl.transport.sending.rank_orders import WireOrders
from async_rl.transport.sending.rank_sender import RankSender
from async_rl.transport.wire import shared_memory
from async_rl.transport.wire.process_group import GroupPlace, Link, LinkPool
from async_rl.transport.wire.rendezvous import WireRendezvous
from async_rl.transport.wire.shared_memory import MappedMemory
from async_rl.types import VersionRecord
from tests.support.waiting import PATIENCE_S

CPU = torch.device("cpu")
TENSORS = {"matrix": torch.arange(2_000_000.0).reshape(2000, 1000), "bias": torch.arange(9.0)}
SPECS = tuple(ParameterSpec(name=name, shape=tuple(tensor.shape), dtype="float32") for name, tensor in TENSORS.items())
MATRIX, BIAS = (Box.whole(spec) for spec in SPECS)
HELD = (
    {MATRIX.cut(0, 1000): TENSORS["matrix"][:1000]},
    {MATRIX.cut(1000, 2000): TENSORS["matrix"][1000:], BIAS: TENSORS["bias"]},
)


class Learner:
    """Two ranks: one has the upper rows of the matrix, the other the lower rows and the bias."""

    def __init__(self, wire: WireConfig, snapshots: Path) -> None:
        self.store, self.orders = HashStore(), HashStore()
        layout = plan_layout(SPECS, dict(enumerate(map(list, HELD))))
        self.rank_senders = [
            RankSender(
                WireRendezvous.listening_at(wire.host, self.store),
                WireOrders(self.orders, rank, fence=1),
                layout,
                rank,
                CPU,
                wire,
                snapshots=snapshots,
            )
            for rank in range(2)
        ]
        self.rank_senders[1].follow_orders()
        self.snapshots = snapshots
        self._versions = count(1)

    def pack(self, *, plus: float = 0.0) -> VersionRecord:
        """The next version, which takes the place of all before it."""
        version = next(self._versions)
        for rank_sender, held in zip(self.rank_senders, HELD, strict=True):
            rank_sender.pack_parcel(version, {box: tensor + plus for box, tensor in held.items()})
        digests = [rank_sender.begin_digest(version) for rank_sender in self.rank_senders]
        digest = digests[0].result(PATIENCE_S)
        return VersionRecord(version=version, timeline="a", step=version, digest=digest)

    @property
    def source(self) -> PackedSource:
        """As it stands on the board."""
        first = self.rank_senders[0]
        return PackedSource(fence=1, host="127.0.0.1", layout=first.layout, deltas=first.deltas, versions=first.packed)

    def write_snapshot(self, record: VersionRecord) -> None:
        self.rank_senders[0].write_snapshot(record)


@pytest.fixture(scope="module", params=[True, False], ids=["memory", "apart"])
def wire(request: pytest.FixtureRequest) -> WireConfig:
    """`apart`: as if workers were on other machines."""
    return WireConfig(operation_timeout_s=60.0, rendezvous_timeout_s=60.0, bucket_mb=1.0, shared_memory=request.param)


@pytest.fixture(scope="module")
def learner(wire: WireConfig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Learner]:
    learner = Learner(wire, tmp_path_factory.mktemp("run") / "snapshots")
    yield learner
    for rank_sender in learner.rank_senders:
        rank_sender.close()


def catch_up(wire: WireConfig, snapshots: Path | None = None) -> CatchUp:
    return CatchUp(specs=SPECS, placement=Placement(devices=(CPU,)), wire=wire, store=HashStore(), snapshots=snapshots)


def test_what_is_easier_on_the_others_comes_first(learner: Learner, wire: WireConfig) -> None:
    record = learner.pack()
    learner.write_snapshot(record)
    with_snapshots, without = catch_up(wire, learner.snapshots), catch_up(wire)
    ways: list[str] = []
    for worker, known in ((with_snapshots, learner.source), (without, learner.source), (with_snapshots, None)):
        received, way = worker.fetch(record, known, Event())
        assert received.expected.record == record
        assert all(torch.equal(received.weights[name], tensor) for name, tensor in TENSORS.items())
        received.expected.unlock()
        ways.append(way)
    first, second = ("the learner's memory",) * 2 if wire.shared_memory else ("a snapshot", "the learner")
    assert ways == [first, second, "a snapshot"]


def test_what_cannot_be_read_in_place_comes_to_host_memory_where_the_gpu_has_no_room(
    learner: Learner, wire: WireConfig
) -> None:
    """The worker's device is a GPU that does not exist here: memory there cannot be allocated."""
    assert compat  # importing it puts stand-ins in the place of CUDA's streams where there is no GPU
    record = learner.pack()
    learner.write_snapshot(record)
    worker = replace(catch_up(wire, learner.snapshots), placement=Placement(devices=(torch.device("cuda"),), fetched_to=CPU))
    source = _on_another_machine(learner.source, record.version)
    for known, expected in ((None, "a snapshot"), (source, "the learner")):
        found, way = replace(worker, snapshots=None if known is not None else learner.snapshots).fetch(record, known, Event())
        assert way == expected
        assert all(torch.equal(found.weights[name], tensor) for name, tensor in TENSORS.items())


@pytest.mark.parametrize("failure", [torch.OutOfMemoryError(), RuntimeError("CUDA error: out of memory"), OSError(EMFILE, "")])
def test_a_device_without_room_is_no_reason_to_end(
    learner: Learner, wire: WireConfig, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    def full(*_: object, **__: object) -> None:
        raise failure

    record = learner.pack()
    source = _on_another_machine(learner.source, record.version)
    monkeypatch.setattr(parcel_receiver, "ParcelMemory", full)
    with pytest.raises(WireError, match=r"the learner: cpu has no room for parcel 0 \(0\.00 GB\)"):
        catch_up(wire).fetch(record, source, Event())


def test_a_host_that_cannot_share_what_ranks_read_is_no_reason_to_end(
    learner: Learner, wire: WireConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory, "_reserve", lambda _: None)
    record = learner.pack()
    shared = replace(catch_up(wire), placement=Placement(devices=(CPU,), is_shared=True))
    with pytest.raises(WireError, match=r"no room for parcel 0 .* that other processes of the worker can open"):
        shared.fetch(record, _on_another_machine(learner.source, record.version), Event())


def test_what_another_learner_packed_is_no_memory_for_the_next_push(learner: Learner, wire: WireConfig) -> None:
    """The worker has heard of a new learner, of one rank, and then takes a snapshot of the old one, which had two."""
    record = learner.pack()
    learner.write_snapshot(record)
    of_two, _ = catch_up(wire, learner.snapshots).fetch(record, None, Event())
    layout = plan_layout(SPECS, {0: [MATRIX, BIAS]})
    new = PackedSource(fence=2, host="127.0.0.1", layout=layout, deltas="parallel", versions={})
    receiver = ParcelReceiver(SPECS, Placement(devices=(CPU,)), wire, HashStore())
    with pytest.raises(WireError, match="it has not packed version 1"):
        receiver.expect_from_learner(replace(record, version=1), new)
    receiver.recycle(of_two)
    assert receiver.holds == ""


def test_other_processes_of_the_worker_can_open_what_it_received(learner: Learner, wire: WireConfig) -> None:
    record, source = learner.pack(), learner.source
    shared = replace(catch_up(wire), placement=Placement(devices=(CPU,), is_shared=True))
    received, _ = shared.fetch(record, source, Event())
    addresses = received.weights.addresses
    assert not {*addresses} & {parcel.address for parcel in source.versions[record.version]}, "they outlive the learner"
    for number, (address, parcel) in enumerate(zip(addresses, source.layout.parcels, strict=True)):
        memory = MappedMemory.open(address, parcel.num_bytes, [CPU])
        assert memory is not None
        assert torch.equal(memory.data, learner.rank_senders[number].parcel(record.version))
    received.expected.unlock()
    alone, _ = catch_up(wire).fetch(record, _on_another_machine(source, record.version), Event())
    assert alone.weights.addresses == ("", "")


def test_the_gpus_of_an_engine_take_parcels_in_turn(
    learner: Learner, wire: WireConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = learner.pack()
    source = _on_another_machine(learner.source, record.version)
    gpus = torch.device("cuda", 4), torch.device("cuda", 6)
    receiver = ParcelReceiver(SPECS, Placement(devices=gpus, fetched_to=CPU), wire, HashStore())
    joined: list[GroupPlace] = []

    @contextmanager
    def use(_: LinkPool, rendezvous: WireRendezvous, place: GroupPlace, abandoned: Event) -> Iterator[Link]:
        joined.append(place)
        raise WireError("there are no such GPUs")
        yield

    monkeypatch.setattr(LinkPool, "use", use)
    groups = tuple(ParcelGroup(parcel=number, group=f"{number}", members=("me",), base=-1) for number in range(2))
    begin = PushBegin(fence=1, generation=1, members=("me",), groups=groups, backend="gloo", transfer_bytes=1 << 20)
    with pytest.raises(WireError, match="there are no such GPUs"):
        receiver.receive(receiver.expect_from_learner(record, source), begin, "me", Event())
    assert {place.group: place.device for place in joined} == {"0": gpus[0], "1": gpus[1]}


def _on_another_machine(source: PackedSource, version: int) -> PackedSource:
    return replace(source, versions={version: tuple(replace(each, address="") for each in source.versions[version])})


def test_what_it_has_stays_as_it_is_until_it_lets_go(learner: Learner, wire: WireConfig) -> None:
    received, _ = catch_up(wire).fetch(learner.pack(), learner.source, Event())
    for _ in range(2):
        learner.pack(plus=1)
    assert torch.equal(received.weights["matrix"], TENSORS["matrix"])
    received.expected.unlock()


def test_a_version_that_is_nowhere_is_refused_for_all_reasons(learner: Learner, wire: WireConfig) -> None:
    record = learner.pack()
    learner.write_snapshot(record)
    worker = catch_up(wire, learner.snapshots)
    with pytest.raises(WireError) as nowhere:
        worker.fetch(replace(record, version=99), learner.source, Event())
    assert str(nowhere.value) == (
        "the learner's memory: it has not packed version 99; a snapshot: there is none of version 99; "
        "the learner: it has not packed version 99"
    )
    with pytest.raises(WireError, match=f"a snapshot: the parcels of version .* add up to {record.digest}, not to another"):
        worker.fetch(replace(record, digest="another"), None, Event())


def test_a_cancelled_fetch_gives_up(learner: Learner, wire: WireConfig) -> None:
    abandoned = Event()
    abandoned.set()
    if not wire.shared_memory:
        with pytest.raises(WireError, match="it was cancelled"):
            catch_up(wire).fetch(learner.pack(), learner.source, abandoned)


def test_a_worker_with_another_model_hears_how_it_differs(learner: Learner, wire: WireConfig) -> None:
    record = learner.pack()
    other = replace(catch_up(wire), specs=(SPECS[0], replace(SPECS[1], shape=(8,))))
    with pytest.raises(FleetMismatch, match=r"sends bias float32\[9\], this model has bias float32\[8\]"):
        other.fetch(record, learner.source, Event())


def test_a_version_that_is_given_up_before_it_is_written_leaves_no_snapshot(learner: Learner) -> None:
    first = learner.pack()
    learner.pack()
    with pytest.raises(WireError, match=f"version {first.version} has been given up for newer ones"):
        learner.write_snapshot(first)
    assert not list(learner.snapshots.glob(f"*version-{first.version:08d}*"))


def test_a_folder_that_cannot_be_written_to_is_named(learner: Learner) -> None:
    record = learner.pack()
    shutil.rmtree(learner.snapshots, ignore_errors=True)
    learner.snapshots.write_text("a file where the folder should be")
    with pytest.raises(WireError, match=r"cannot write to .*snapshots: "):
        learner.write_snapshot(record)
    learner.snapshots.unlink()
