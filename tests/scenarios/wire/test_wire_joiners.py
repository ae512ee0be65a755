"""Workers that join late, during a push or without a learner: which version they serve, and how they fetched it."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from http.client import HTTPConnection
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Event
from urllib.parse import urlsplit

import pytest
import torch
from structlog.testing import capture_logs

from async_rl.board.inbox import Inbox
from async_rl.config import WireConfig
from async_rl.errors import WireError
from async_rl.protocols import Member
from async_rl.transport import snapshot
from async_rl.transport.digest import digest_of, specs_of
from async_rl.transport.messages import (
    TO_LEARNER,
    TO_LEARNER_MESSAGES,
    WorkerHello,
)
from async_rl.transport.packed_source import PackedSource, read_source
from async_rl.transport.packed_versions import PackedVersions
from async_rl.transport.plan import plan_layout
from async_rl.transport.wire.http import ParcelServer, pull
from async_rl.types import VersionRecord
from buffer import open_buffer
from tests.scenarios.wire.test_wire import Worker, all_needy, running
from tests.scenarios.wire.wire_learner import WIRE
from tests.support.waiting import PATIENCE_S, eventually
from tests.support.warm_processes import running_module
from tests.support.wire_board import StageBoard, board_of, config_of, go_live
from tests.support.wire_weights import Sender, held, sending, weights

NEVER = Event()


@pytest.fixture
async def board(redis_server: str, run_name: str) -> AsyncIterator[StageBoard]:
    async with board_of(redis_server, run_name) as board:
        yield board


async def left(snapshots: Path, version: int) -> None:
    async def is_there() -> bool:
        return snapshot.read_manifest(snapshots, version) is not None

    await eventually(is_there, f"a snapshot of version {version} is left")


async def says_hello(inbox: Inbox, worker: Worker) -> None:
    while WorkerHello(member=worker.name) not in await inbox.read():
        pass


@asynccontextmanager
async def publishing(url: str, run: str) -> AsyncIterator[Callable[[VersionRecord], Awaitable[None]]]:
    """Makes versions live, as the learner does."""
    config = config_of(url, run)
    async with open_buffer(config) as buffer:
        fence = await buffer.acquire("test", config.limits)
        yield lambda record: buffer.publish(fence, record)
        await buffer.resign(fence)


@pytest.mark.parametrize(("shared_memory", "way"), [(True, "the learner's memory"), (False, "the learner")])
async def test_joiners_catch_up_alone_while_versions_flow(
    board: StageBoard, redis_server: str, run_name: str, shared_memory: bool, way: str
) -> None:
    wire = WireConfig(operation_timeout_s=60.0, bucket_mb=0.25, shared_memory=shared_memory)
    versions = {version: weights(seed=version, rows=400) for version in range(1, 6)}
    joined: list[Worker] = []

    async def push(version: int) -> None:
        await sender.push(version, versions[version])
        await publish(sender.records[version])
        await sender.flip(version)

    with capture_logs() as logs:
        async with (
            asyncio.timeout(PATIENCE_S),
            publishing(redis_server, run_name) as publish,
            sending(board, wire, versions[1]) as sender,
            AsyncExitStack() as workers,
        ):
            for version in versions:
                await push(version)
                joiners = [Worker(board, f"joined at {version}, {number}", versions[1], wire) for number in range(4)]
                await workers.enter_async_context(running(*joiners))
                await joiners[0].serves(version)  # no push brought it there; the others may be sent the next one meanwhile
                joined += joiners
            newcomers = asyncio.create_task(serve(sender, 5))
            for worker in joined:
                await worker.serves(5)
            newcomers.cancel()
    for worker in joined:
        served = [version for version, _ in worker.served]
        assert served == sorted(set(served)), "no version twice, none after a newer one"
        assert all(digest == digest_of(versions[version]) for version, digest in worker.served)
    alone = [entry["event"] for entry in logs if ", from " in entry["event"]]
    assert len(alone) >= 5
    assert all(event.endswith(f", from {way}") for event in alone)


async def serve(sender: Sender, version: int) -> None:
    """Push to the members that cannot fetch the version, as the publisher does."""
    while True:
        await sender.wait_for_members_behind(version)
        await sender.push(version, {})
        await sender.flip(version)


async def test_while_there_is_no_learner_a_snapshot_of_the_live_version_serves(
    board: StageBoard, redis_server: str, run_name: str, tmp_path: Path
) -> None:
    async with asyncio.timeout(PATIENCE_S):
        with running_module("tests.scenarios.wire.wire_learner", redis_server, run_name, tmp_path, 3) as first:
            await left(tmp_path, 3)
            source = await read_source(board)
            assert source is not None
            await pulling_from_one_that_dies(source, first)
        async with running(restarted := Worker(board, "restarted", weights(0), WIRE, tmp_path)):
            await restarted.serves(3)
            hears = await Inbox.open(board, TO_LEARNER, TO_LEARNER_MESSAGES)
            file = snapshot.file_of(snapshot.folder_of(tmp_path, 3), 0)
            flip_a_bit(file)
            with capture_logs() as logs:
                async with running(another := Worker(board, "another", weights(0), WIRE, tmp_path)):
                    await says_hello(hears, another)
                    assert another.served == []
                    [reason] = [entry["event"] for entry in logs if "waiting for the learner" in entry["event"]]
                    assert re.search("the learner's memory: .* a snapshot: chunk . of parcel 0 .* has digest", reason)
                    async with sending(board, WIRE, weights(0), fence=2, timeline="b") as second:
                        await all_needy(second, 4, restarted, another)
                        await second.push(4, pushed := weights(seed=4))
                        await go_live(board, redis_server, run_name, second.records[4])
                        await second.flip(4)
                        await another.serves(4)
                        await restarted.serves(4)
    assert restarted.served == [(3, digest_of(weights(seed=3))), (4, digest_of(pushed))]
    assert another.served == [(4, digest_of(pushed))]


async def test_a_member_taken_for_dead_is_pushed_to_again_after_it_caught_up(
    board: StageBoard, redis_server: str, run_name: str
) -> None:
    wire = WireConfig(operation_timeout_s=5.0, bucket_mb=0.25)  # the first push waits so long, and for the last one it must do
    patient = wire.model_copy(update={"operation_timeout_s": 60.0})
    async with (
        asyncio.timeout(PATIENCE_S),
        publishing(redis_server, run_name) as publish,
        sending(board, wire, weights(0, rows=40)) as sender,
    ):
        dead = Member(id="w", host="localhost", version=-1, device="cpu")
        await board.announce(replace(dead, catches_up="with version 1"), 300)
        assert await sender.members_behind(1) == [], "it helps itself"
        await board.announce(dead, 300)
        assert "w" in (await sender.push(1, weights(1, rows=40))).dropped
        await publish(sender.records[1])
        hears = await Inbox.open(board, TO_LEARNER, TO_LEARNER_MESSAGES)
        async with running(again := Worker(board, "w", weights(0, rows=40), patient)):
            await again.serves(1)
            await says_hello(hears, again)
            await sender.flip(1)
            await all_needy(sender, 2, again)
            assert (await sender.push(2, weights(2, rows=40))).staged == ("w",)


async def test_every_nth_live_version_is_snapshotted(board: StageBoard, tmp_path: Path) -> None:
    wire = WireConfig(snapshot_every=2)
    async with asyncio.timeout(PATIENCE_S), sending(board, wire, weights(0, rows=40), snapshots=tmp_path) as sender:
        for version in (1, 2, 3):
            sender.pack(version, weights(version, rows=40))
            for _ in range(2):  # as for newcomers
                await sender.flip(version)
            if version != 2:
                await left(tmp_path, version)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["version-00000001", "version-00000003"]


async def pulling_from_one_that_dies(source: PackedSource, process: BaseProcess) -> None:
    [packed] = source.versions[3]
    data = torch.empty(source.layout.parcels[0].num_bytes, dtype=torch.uint8)

    def received(arrived: int) -> None:
        process.kill()

    with pytest.raises(WireError, match="cannot pull version 3"):
        await asyncio.to_thread(pull, packed.url, 3, data, 1 << 18, 4.0, NEVER, received)


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


# -- one rank's server -------------------------------------------------------------------------------------------------------

TENSORS = weights(seed=1, rows=4000)
LAYOUT = plan_layout(specs_of(TENSORS), {0: list(held(TENSORS))})


@contextmanager
def serving(timeout_s: float) -> Iterator[tuple[PackedVersions, ParcelServer]]:
    versions = PackedVersions(LAYOUT, LAYOUT.parcels[0], torch.device("cpu"), shared=True)
    server = ParcelServer("127.0.0.1", versions.open_version, timeout_s)
    try:
        yield versions, server
    finally:
        server.close()


def pulled(server: ParcelServer, version: int) -> torch.Tensor:
    data = torch.empty(LAYOUT.parcels[0].num_bytes, dtype=torch.uint8)
    pull(server.url, version, data, 1 << 20, 10.0, NEVER, lambda _: None)
    return data


def test_what_was_packed_is_what_is_pulled() -> None:
    with serving(timeout_s=10.0) as (versions, server):
        versions.add(1, held(TENSORS), keep=())
        versions.add(2, held(weights(seed=2)), keep=(1,))
        assert torch.equal(pulled(server, 1), versions.parcel(1))
        assert torch.equal(pulled(server, 2), versions.parcel(2))
        versions.add(3, held(TENSORS), keep=(2,))
        with pytest.raises(WireError, match="version 1 has been given up for newer ones"):
            pulled(server, 1)


@pytest.mark.parametrize("path", ["", "/1", "/guess/1", "SECRET", "SECRET/", "SECRET/-1", "SECRET/one", "SECRET/1/2"])
def test_a_url_without_the_secret_is_not_found(path: str) -> None:
    with serving(timeout_s=10.0) as (versions, server):
        versions.add(1, held(TENSORS), keep=())
        where = urlsplit(server.url)
        connection = HTTPConnection(where.hostname or "", where.port)
        connection.request("GET", path.replace("SECRET", where.path))
        assert connection.getresponse().status in (400, 404)
        connection.close()


async def test_a_reader_that_stops_keeps_its_version_for_one_timeout_and_no_training_from_going_on() -> None:
    later = {version: held(weights(seed=version)) for version in (2, 3, 4, 5)}
    with serving(timeout_s=10.0) as (versions, server):
        versions.add(1, held(TENSORS), keep=())
        where, first = urlsplit(server.url), versions.parcel(1)
        with socket.create_connection((where.hostname or "", where.port or 0)) as stopped:
            stopped.sendall(f"GET {where.path}/1 HTTP/1.0\r\n\r\n".encode())
            assert stopped.recv(1)  # the rest fills the buffers between us, and then the server waits
            before = first.clone()
            for version in (2, 3):
                versions.add(version, later[version], keep=())
            assert torch.equal(first, before), "nothing was written over what is being read"
            for version in (4, 5):  # while the reader still holds a connection
                versions.add(version, later[version], keep=())
                assert torch.equal(pulled(server, version), versions.parcel(version))
