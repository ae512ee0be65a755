"""A member that leaves, or does not reach the learner, says so, and no push waits for it."""

from __future__ import annotations

import asyncio
import json
import socket
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest

from async_rl.board.inbox import Inbox, post
from async_rl.config import WireConfig
from async_rl.protocols import Member
from async_rl.transport.messages import (
    TO_LEARNER,
    TO_LEARNER_MESSAGES,
    TO_WORKERS,
    TO_WORKERS_MESSAGES,
    PushBegin,
    PushCancel,
    PushFailed,
    PushOffer,
    PushReady,
    PushStaged,
    ToLearner,
    WorkerHello,
    WorkerLeft,
)
from async_rl.transport.packed_source import PACKED_NOTE
from async_rl.transport.sending import push_attempt
from async_rl.types import VersionRecord
from tests.scenarios.wire.test_wire import Worker, running
from tests.support.wire_board import StageBoard, board_of
from tests.support.wire_weights import sending, weights

PATIENT = WireConfig(bucket_mb=0.25, operation_timeout_s=300)


async def test_a_push_does_not_wait_for_a_member_that_leaves_meanwhile(redis_server: str, run_name: str) -> None:
    async with board_of(redis_server, run_name) as board, sending(board, PATIENT, weights(0)) as sender:
        offers = await Inbox.open(board, TO_WORKERS, TO_WORKERS_MESSAGES)
        await board.announce(Member(id="gone", host="localhost", version=-1, device="cpu"), 300)
        pushed = weights(seed=1)
        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            push = group.create_task(sender.push(1, pushed))
            while not any(isinstance(message, PushOffer) for message in await offers.read()):
                pass  # each read waits for messages
            await post(board, TO_LEARNER, WorkerLeft(member="gone"))
        assert push.result().dropped == {"gone": "left the run"}
        assert await sender.members_behind(2) == [], "it is still listed, and worth no other offer"


async def test_a_receiver_that_ends_leaves_and_may_come_back(redis_server: str, run_name: str) -> None:
    async with board_of(redis_server, run_name) as board, sending(board, PATIENT, weights(0)) as sender:
        for version in (1, 2):
            worker, pushed = Worker(board, "w", weights(0), PATIENT), weights(seed=version)
            async with running(worker):
                assert await sender.wait_for_members_behind(version) == ["w"]
                report = await sender.push(version, pushed)
                assert report.staged == ("w",)


async def test_a_push_goes_on_at_once_without_a_member_that_is_cut_off(
    redis_server: str, run_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(push_attempt, "_GRACE_S", PATIENT.operation_timeout_s)
    wire = PATIENT.model_copy(update={"shared_memory": False})  # else the other worker would need no group
    pushed = weights(seed=1)
    async with board_of(redis_server, run_name) as board, sending(board, wire, weights(0)) as sender:
        offers = await Inbox.open(board, TO_WORKERS, TO_WORKERS_MESSAGES)
        worker = Worker(board, "w", weights(0), wire)
        async with running(worker), asyncio.timeout(60), asyncio.TaskGroup() as group:
            await sender.wait_for_members_behind(1)
            await board.announce(Member(id="far", host="localhost", version=-1, device="cpu"), 300)
            push = group.create_task(sender.push(1, pushed))
            while not push.done():
                for message in await offers.read():
                    reply = {"member": "far"} | {key: getattr(message, key, 0) for key in ("fence", "generation")}
                    if isinstance(message, PushOffer) and "far" in message.to:
                        await post(board, TO_LEARNER, PushReady(**reply, by_memory=()))
                    elif isinstance(message, PushBegin) and "far" in message.members:
                        await post(board, TO_LEARNER, PushFailed(**reply, reason="connect: timed out", is_cut_off=True))
        assert push.result().staged == ("w",)
        assert push.result().dropped == {"far": "does not reach the learner: connect: timed out"}


async def test_a_member_that_answers_too_late_is_told_that_the_attempt_is_over(redis_server: str, run_name: str) -> None:
    async with board_of(redis_server, run_name) as board, sending(board, PATIENT, weights(0)) as sender:
        offers = await Inbox.open(board, TO_WORKERS, TO_WORKERS_MESSAGES)
        await board.announce(Member(id="late", host="localhost", version=-1, device="cpu"), 300)
        told: list[object] = []
        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            first = group.create_task(sender.push(1, weights(seed=1)))
            while not first.done():  # it fails, so the next offer waits for it only a moment
                for message in await offers.read():
                    if isinstance(message, PushOffer):
                        reply: dict[str, Any] = {"member": "late", "fence": message.fence, "generation": message.generation}
                        await post(board, TO_LEARNER, PushFailed(**reply, reason="broken", is_cut_off=False))
            await post(board, TO_LEARNER, WorkerHello(member="late"))
            await sender.wait_for_members_behind(2)
            report = await sender.push(2, weights(seed=2))
            while not any(isinstance(message, PushCancel) for message in told):
                told += await offers.read()
        assert "did not answer the next offer" in report.dropped["late"]
        assert [type(message) for message in told][-2:] == [PushOffer, PushCancel]


async def test_a_worker_does_not_wait_for_ever_for_a_transfer_to_begin(redis_server: str, run_name: str) -> None:
    wire = WireConfig(bucket_mb=0.25, operation_timeout_s=1)
    async with board_of(redis_server, run_name) as board, sending(board, PATIENT, weights(0)) as sender:
        said = await Inbox.open(board, TO_LEARNER, TO_LEARNER_MESSAGES)
        async with asyncio.timeout(60), running(Worker(board, "w", weights(0), wire)):
            await sender.wait_for_members_behind(1)
            await sender.push(1, weights(seed=1))
            await post(board, TO_WORKERS, PushOffer(fence=1, generation=99, to=("w",), record=sender.records[1]))
            replies: list[object] = []
            while not (failed := [each for each in replies if isinstance(each, PushFailed) and each.generation == 99]):
                replies += await said.read()
    assert [each.reason for each in failed] == ["the transfer did not begin within 2 s of the offer"]


class OtherBoard:
    """A board with other answers; a worker's end of the wire is given it."""

    def __init__(self, board: StageBoard) -> None:
        self._board = board

    def __getattr__(self, name: str) -> Any:
        return getattr(self._board, name)


class BehindFirewall(OtherBoard):
    """The learner's parcels are at a port whose machine swallows packets."""

    port: int

    async def note(self, name: str) -> bytes | None:
        text = await self._board.note(name)
        if text is None or name != PACKED_NOTE:
            return text
        said = json.loads(zlib.decompress(text))
        for parcels in said["versions"].values():
            for parcel in parcels:
                parcel["url"] = f"http://127.0.0.1:{self.port}/secret"
        return zlib.compress(json.dumps(said).encode())


@contextmanager
def swallowing() -> Iterator[int]:
    """A port with a full queue: the kernel drops further connections without an answer."""
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        waiting = [socket.socket() for _ in range(4)]
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(full.getsockname())
        yield full.getsockname()[1]
        for each in waiting:
            each.close()


@pytest.mark.parametrize("is_cut_off", [False, True])
async def test_a_worker_that_fails_says_whether_it_reaches_the_learners_machine(
    redis_server: str, run_name: str, is_cut_off: bool
) -> None:
    async with board_of(redis_server, run_name) as board, sending(board, PATIENT, weights(0)) as sender:
        with swallowing() as port:
            behind = BehindFirewall(board)
            behind.port = port
            worker = Worker(cast("StageBoard", behind) if is_cut_off else board, "w", weights(0), PATIENT)
            said = await Inbox.open(board, TO_LEARNER, TO_LEARNER_MESSAGES)
            async with asyncio.timeout(60), running(worker):
                await sender.wait_for_members_behind(1)
                await sender.push(1, weights(seed=1))  # from here on the learner's note names parcels
                attempt: dict[str, Any] = {"fence": 1, "generation": 99}
                await post(board, TO_WORKERS, PushOffer(**attempt, to=("w",), record=sender.records[1]))
                replies: list[object] = []
                while not any(isinstance(reply, PushReady) and reply.generation == 99 for reply in replies):
                    replies += await said.read()
                await post(board, TO_WORKERS, PushCancel(**attempt))
                while not (failed := [reply for reply in replies if isinstance(reply, PushFailed)]):
                    replies += await said.read()
    assert [reply.is_cut_off for reply in failed] == [is_cut_off]


class HeldBack(OtherBoard):
    """Holds back what is read, until told."""

    def __init__(self, board: StageBoard) -> None:
        super().__init__(board)
        self.released = asyncio.Event()
        self.released.set()

    async def read(self, topic: str, after: str, wait_s: float) -> Any:
        found = await self._board.read(topic, after, wait_s)
        if self.released.is_set():
            return found
        await self.released.wait()
        return await self._board.read(topic, after, wait_s)


async def test_an_offer_that_is_read_after_its_attempt_is_no_failure(redis_server: str, run_name: str) -> None:
    async with board_of(redis_server, run_name) as board, sending(board, PATIENT, weights(0)) as sender:
        held_back = HeldBack(board)
        said = await Inbox.open(board, TO_LEARNER, TO_LEARNER_MESSAGES)
        async with asyncio.timeout(60), running(Worker(cast("StageBoard", held_back), "w", weights(0), PATIENT)):
            await sender.wait_for_members_behind(1)
            await sender.push(1, weights(seed=1))
            replies: list[object] = []
            while not any(isinstance(reply, PushStaged) for reply in replies):
                replies += await said.read()
            attempt: dict[str, Any] = {"fence": 1, "generation": 99}
            held_back.released.clear()
            await post(board, TO_WORKERS, PushOffer(**attempt, to=("w",), record=sender.records[1]))
            await post(board, TO_WORKERS, PushCancel(**attempt))
            held_back.released.set()
            replies = []
            while not any(isinstance(reply, WorkerHello) for reply in replies):
                replies += await said.read()
    assert not any(isinstance(reply, PushFailed) for reply in replies)


async def test_a_transfer_that_begins_when_its_time_limit_passes_ends_no_worker(redis_server: str, run_name: str) -> None:
    """The state changes a few turns of the loop after the time is over; a message may be handled in between."""
    wire = WireConfig(bucket_mb=0.25, operation_timeout_s=1)
    async with board_of(redis_server, run_name) as board, sending(board, PATIENT, weights(0)) as sender:
        said = await Inbox.open(board, TO_LEARNER, TO_LEARNER_MESSAGES)
        worker = Worker(board, "w", weights(0), wire)
        async with asyncio.timeout(60), running(worker):
            await sender.wait_for_members_behind(1)
            await sender.push(1, weights(seed=1))
            for turns in range(6):
                attempt: dict[str, Any] = {"fence": 1, "generation": 99 + turns}
                await post(board, TO_WORKERS, PushOffer(**attempt, to=("w",), record=sender.records[1]))
                await until_reply(said, PushReady, 99 + turns)
                time.sleep(2.1)  # noqa: ASYNC251  (the loop is blocked)
                for _ in range(turns):
                    await asyncio.sleep(0)
                await worker.receive(PushBegin(**attempt, members=("w",), groups=(), backend="gloo", transfer_bytes=1))
                await until_reply(said, PushStaged | PushFailed, 99 + turns)


async def until_reply(said: Inbox[ToLearner], kind: Any, generation: int) -> None:
    while not any(isinstance(reply, kind) and reply.generation == generation for reply in await said.read()):
        pass  # each read waits for messages


class LateAnswers(OtherBoard):
    """Holds the answer to one heartbeat back, which says what is live. A heartbeat announces what was announced before."""

    live: VersionRecord | None = None
    announced: Member | None = None

    def __init__(self, board: StageBoard) -> None:
        super().__init__(board)
        self.holds = False
        self.held, self.released, self.passed_on = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def live_version(self) -> VersionRecord | None:
        return self.live

    async def announce(self, member: Member, ttl_s: float) -> VersionRecord | None:
        answer, is_heartbeat, self.announced = self.live, member == self.announced, member
        await self._board.announce(member, ttl_s)
        if self.holds and is_heartbeat:
            self.holds = False
            self.held.set()
            await self.released.wait()
        elif self.released.is_set():
            self.passed_on.set()
        return answer


async def test_an_old_answer_about_the_live_version_does_not_look_like_a_lost_run(redis_server: str, run_name: str) -> None:
    """A learner of a new timeline publishes while the answer that names the last one's version is on its way."""
    async with board_of(redis_server, run_name) as board, asyncio.timeout(60):
        late = LateAnswers(board)
        worker = Worker(cast("StageBoard", late), "w", weights(0), PATIENT)
        async with running(worker):
            async with sending(board, PATIENT, weights(0)) as first:
                await first.wait_for_members_behind(1)
                await first.push(1, weights(seed=1))
                late.live = first.records[1]
                await first.flip(1)
                await worker.serves(1)
            late.holds = True
            await late.held.wait()
            async with sending(board, PATIENT, weights(0), fence=2, timeline="b") as second:
                await second.wait_for_members_behind(2)
                await second.push(2, weights(seed=2))
                late.live = second.records[2]
                await second.flip(2)
                await worker.serves(2)
                late.released.set()
                await late.passed_on.wait()  # a heartbeat later
        assert [version for version, _ in worker.served] == [1, 2]
