"""A member that leaves, or does not reach the learner, says so, and no push waits for it."""

from __future__ import annotations

import asyncio

from async_rl.board.inbox import Inbox, post
from async_rl.config import WireConfig
from async_rl.protocols import Member
from async_rl.transport.messages import (
    TO_LEARNER,
    TO_WORKERS,
    TO_WORKERS_MESSAGES,
    PushBegin,
    PushFailed,
    PushOffer,
    PushReady,
    WorkerLeft,
)
from tests.scenarios.wire.test_wire import Worker, running
from tests.support.wire_board import board_of
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


async def test_a_push_goes_on_at_once_without_a_member_that_is_cut_off(redis_server: str, run_name: str) -> None:
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
