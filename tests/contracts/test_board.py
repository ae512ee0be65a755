"""What readers and writers of the board may rely on."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from async_rl.errors import FleetMismatch
from async_rl.protocols import Board, Member
from async_rl.replay_protocol import ReplayBuffer
from buffer import keys
from buffer.board import RedisBoard
from buffer.redis_buffer import RedisBuffer
from buffer.server.client import Server
from tests.support.runs import limits, publish

Both = tuple[Board, ReplayBuffer]


async def test_the_first_to_come_sets_the_facts_and_the_others_compare(board: Both):
    await board[0].agree("learner", {"model.size": "1", "sampling.temperature": "1.0"})
    await board[0].agree("worker", {"model.size": "1", "extra": "7"})
    with pytest.raises(FleetMismatch, match=r"this worker .*model.size is 2 here and 1 in the run"):
        await board[0].agree("worker", {"model.size": "2", "extra": "7"})


async def test_a_refusal_shortens_long_values_and_names_the_way_out(board: Both):
    await board[0].agree("learner", {"sampling.stop": "[]"})
    with pytest.raises(FleetMismatch) as refused:
        await board[0].agree("worker", {"sampling.stop": f'["{"9" * 1000}"]'})
    sentence = str(refused.value)
    assert f'sampling.stop is ["{"9" * 57}… here and [] in the run' in sentence
    assert "start it with the run's own configuration" in sentence
    assert "or under another run.name" in sentence


async def test_members_are_listed_while_they_announce(board: Both):
    one, two = (Member(id=name, host="h", version=-1, device="cpu") for name in ("a", "b"))
    await board[0].announce(one, 60)
    await board[0].announce(two, 60)
    moved = Member(id="a", host="h", version=3, device="cpu")
    await board[0].announce(moved, 60)
    assert await board[0].members() == [moved, two]
    await board[0].leave("a")
    await board[0].leave("a")
    assert await board[0].members() == [two]


async def test_a_member_that_fell_silent_is_not_listed(board: Both):
    await board[0].announce(Member(id="a", host="h", version=0, device="cpu"), 0.05)
    while await board[0].members():
        await board[0].read("nothing", "0", 0.02)


async def test_the_board_shows_the_versions(board: Both):
    facts, buffer = board
    member = Member(id="a", host="h", version=-1, device="cpu")
    assert await facts.live_version() is None
    assert await facts.announce(member, 60) is None
    assert await facts.versions() == []
    fence = await buffer.acquire("learner", limits())
    for _ in range(3):
        await publish(buffer, fence)
    assert [record.version for record in await facts.versions()] == [0, 1, 2]
    live = await facts.live_version()
    assert live is not None
    assert (live.version, live.timeline, live.step, live.digest) == (2, "t", 2, "d")
    assert await facts.announce(member, 60) == live, "a heartbeat brings it"


async def test_messages_are_read_in_order_from_any_position(board: Both):
    facts, _ = board
    assert await facts.read("news", "0", 0) == []
    for number in range(3):
        await facts.post("news", {"number": number, "nested": {"text": "x"}})
    await facts.post("other", {"number": 9})
    messages = await facts.read("news", "0", 0)
    assert [message["number"] for _, message in messages] == [0, 1, 2]
    assert [message["number"] for _, message in await facts.read("news", messages[0][0], 5)] == [1, 2]
    assert await facts.read("news", messages[-1][0], 0.01) == []


async def test_a_reader_is_woken_by_a_message(board: Both):
    facts, _ = board
    await facts.post("news", {"number": 0})
    [(position, _)] = await facts.read("news", "0", 0)
    async with asyncio.TaskGroup() as tasks:
        reading = tasks.create_task(facts.read("news", position, 60))
        await asyncio.sleep(0)
        await facts.post("news", {"number": 1})
    assert [message for _, message in reading.result()] == [{"number": 1}]


async def test_messages_of_an_emptied_server_whose_clock_is_behind_are_heard(
    redis_buffer: tuple[RedisBuffer, Server], run_name: str
):
    _, server = redis_buffer
    board, redis = RedisBoard(server, run_name), cast("Any", server.commands)
    await board.post("news", {"number": 1})
    [(position, _)] = await board.read("news", "0-0", 1)
    await redis.delete(keys.topic(run_name, "news"))
    assert await board.read("news", position, 0.05) == []
    await redis.xadd(keys.topic(run_name, "news"), {"message": b'{"number": 2}'}, id="5-0")
    [(again, message)] = await board.read("news", position, 0.05)
    assert (again, message) == ("5-0", {"number": 2})
    assert await board.read("news", again, 0.05) == []
