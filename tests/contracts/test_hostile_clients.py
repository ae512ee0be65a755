"""A hostile client that can reach the run's keys writes anything into them.

Such a client can stop the run, as it could delete it. But the result is an error message or a quarantined group, never a
traceback, never a group that no worker committed, and never a script that blocks the server for ever.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, NamedTuple, cast

import pytest

from async_rl.errors import AsyncRLError
from async_rl.payloads.codec import encode
from async_rl.protocols import Member
from async_rl.types import TakenGroup
from buffer import keys
from buffer.board import RedisBoard
from buffer.redis_buffer import RedisBuffer
from buffer.server.client import Server
from buffer.server.embedded.programs import find_binary
from tests.support.groups import group
from tests.support.private_server import private_server
from tests.support.runs import limits, publish, started

Both = tuple[RedisBuffer, Server]

GARBAGE = [b"", b"\xff\xfe\x00", b"nan", b"1e400", b"-5", b"99999999999999999999", b"x", b"{}", b"[1]", b"\t" * 20]
STRANGERS = [b"", b"\xff\xfe", b"unknown", b"t-5", b"t999999999"]
SCORES = ["inf", "-inf", "1e300", "-1e300", "0.5", "99999999999"]
NAMES = list(keys.KINDS)
ZSETS = ["leases", "reserved", "ready", "again", "taken", "kept", "lottery", "waiting", "asked"]
AUDITED = [
    "state",
    "learner",
    "dropped",
    "leases",
    "reserved",
    "ready",
    "again",
    "taken",
    "kept",
    "lottery",
    "records",
    "payloads",
]
SILENT_S = 100.0
"""A server that does not reply for this long hangs."""


@pytest.fixture(scope="module")
def redis_server() -> Iterator[str]:
    """A server of their own, because a failing test may leave one that is stuck."""
    with private_server(find_binary()) as url:
        yield url


class Scene(NamedTuple):
    """A run with something in every place."""

    buffer: RedisBuffer
    redis: Any
    name: str
    fence: int
    committed: dict[str, bytes]
    """Group -> its bytes, by which it is recognized."""
    reserved: str


async def scene(both: Both, name: str) -> Scene:
    buffer, server = both
    fence = await started(buffer, keep_steps=5)
    committed: dict[str, bytes] = {}

    async def commit(version: int) -> None:
        for ticket in await buffer.reserve("w", version=version, count=2, wait_s=0):
            rolled = group(ticket)
            assert await buffer.commit("w", rolled) == "stored"
            committed[ticket.id] = encode(rolled)

    await commit(0)  # kept
    await buffer.take(fence, step=1, version=0, num_groups=2, wait_s=0)
    await publish(buffer, fence)
    await buffer.release(fence, 1)
    await buffer.checkpoint(fence, 1)
    await commit(1)  # taken
    await buffer.take(fence, step=2, version=1, num_groups=2, wait_s=0)
    await commit(1)  # ready
    [ticket] = await buffer.reserve("w", version=1, count=1, wait_s=0)
    assert await buffer.commit("w", group(ticket, versions=(0, 0))) == "quarantined"
    [ticket] = await buffer.reserve("w", version=1, count=1, wait_s=0)
    audit = await buffer.audit()
    assert audit.is_clean, audit.problems
    return Scene(buffer, cast("Any", server.commands), name, fence, committed, ticket.id)


async def another_scene(both: Both, name: str) -> Scene:
    """Another run in the same server; its learner's lease is short, because many successors wait for it."""
    return await scene((RedisBuffer(both[1], name, learner_lease_s=0.2), both[1]), name)


# -- what other clients do meanwhile -------------------------------------------------------------------------------------
async def commit_the_reserved(found: Scene) -> None:
    await found.buffer.commit("w", group(found.reserved))


async def take_over(found: Scene) -> None:
    await found.buffer.resign(found.fence)
    fence = await found.buffer.acquire("successor", limits())
    await found.buffer.recover(fence, None)


CALLS: list[Callable[[Scene], Awaitable[object]]] = [
    lambda found: found.buffer.stats(),
    lambda found: found.buffer.audit(),
    lambda found: found.buffer.limits(),
    lambda found: found.buffer.hold(found.fence),
    lambda found: found.buffer.renew("w", [found.reserved]),
    lambda found: found.buffer.reserve("w2", version=1, count=1, wait_s=0),
    commit_the_reserved,
    lambda found: found.buffer.position(found.fence, 2),
    lambda found: found.buffer.take(found.fence, step=2, version=1, num_groups=2, wait_s=0),
    lambda found: found.buffer.take(found.fence, step=3, version=1, num_groups=2, wait_s=0, patient=False),
    lambda found: publish(found.buffer, found.fence, after=1),
    lambda found: found.buffer.prioritize(found.fence, dict.fromkeys(found.committed, 2.0)),
    lambda found: found.buffer.release(found.fence, 2),
    lambda found: found.buffer.spent_groups(10),
    lambda found: found.buffer.checkpoint(found.fence, 2),
    lambda found: found.buffer.discard(found.fence, list(found.committed)[:1]),
    lambda found: found.buffer.quarantined(),
    lambda found: found.buffer.quarantined_payload("t000000006"),
    lambda found: found.buffer.readmit("t000000006"),
    lambda found: found.buffer.forget(["t000000006"]),
    lambda found: found.buffer.abandon("w", found.reserved, "failed"),
    lambda found: found.buffer.change_limits({"max_age": 2}),
    take_over,
]


async def live_on(found: Scene) -> None:
    """Make every call once: it replies, or raises a one-sentence error."""
    for call in CALLS:
        try:
            async with asyncio.timeout(SILENT_S):
                answer = await call(found)
        except AsyncRLError as error:
            said = str(error)
            assert said.isprintable(), "it quotes what another client wrote"
        else:
            if isinstance(answer, list):
                batch = [entry for entry in cast("list[object]", answer) if isinstance(entry, TakenGroup)]
                assert_ours(found, batch)
    await found.redis.ping()


def assert_ours(found: Scene, batch: list[TakenGroup]) -> None:
    assert len({entry.group.id for entry in batch}) == len(batch)
    for entry in batch:
        assert found.committed.get(entry.group.id) == encode(entry.group)
        assert 0 <= entry.age <= 2


async def complaint(found: Scene) -> str:
    """Return what an audit prints."""
    try:
        return "\n".join((await found.buffer.audit()).problems)
    except AsyncRLError as error:
        return str(error)


def key(found: Scene, name: str) -> str:
    return keys.key(found.name, name)


def seeded() -> random.Random:
    seed = random.randrange(2**32)
    print(f"seed {seed}", file=sys.stderr)
    return random.Random(seed)


# -- the attacks --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", NAMES)
async def test_a_key_of_another_type_is_named(redis_buffer: Both, run_name: str, name: str):
    found = await scene(redis_buffer, run_name)
    await found.redis.delete(key(found, name))
    await found.redis.set(key(found, name), b"garbage\xff")
    if name in AUDITED:
        assert f"{key(found, name)} is a string and should be a " in await complaint(found)
    await live_on(found)


async def test_foreign_payloads_are_quarantined(redis_buffer: Both, run_name: str):
    draw, found = seeded(), await scene(redis_buffer, run_name)
    payloads = key(found, "payloads")
    for ticket in await found.redis.hkeys(payloads):
        await found.redis.hset(payloads, ticket, draw.randbytes(draw.randrange(200)))
    await found.redis.hset(payloads, b"\xff\xfe", b"stray")
    said = await complaint(found)
    assert "without a group" in said
    assert "payload bytes are counted" in said
    assert await found.buffer.take(found.fence, step=2, version=1, num_groups=2, wait_s=0) == []
    assert {report["ticket"] for report in await found.buffer.quarantined()} >= {"t000000002", "t000000003"}
    await live_on(found)


async def test_a_payload_under_another_tickets_name_is_not_taken(redis_buffer: Both, run_name: str):
    found = await scene(redis_buffer, run_name)
    payloads = key(found, "payloads")
    await found.redis.hset(payloads, "t000000004", await found.redis.hget(payloads, "t000000005"))
    assert await found.buffer.take(found.fence, step=3, version=1, num_groups=2, wait_s=0, patient=False) == []
    assert "t000000004" in {report["ticket"] for report in await found.buffer.quarantined()}
    await live_on(found)


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize(
    "ticket", ["t000000000", "t000000002", "t000000004", "t000000007"], ids=["kept", "taken", "ready", "reserved"]
)
async def test_a_foreign_record_is_found(redis_buffer: Both, run_name: str, ticket: str, garbage: bytes):
    found = await scene(redis_buffer, run_name)
    await found.redis.hset(key(found, "records"), ticket, garbage)
    assert "recorded unreadably" in await complaint(found)
    await live_on(found)


async def test_a_record_that_belongs_elsewhere_is_found(redis_buffer: Both, run_name: str):
    found = await scene(redis_buffer, run_name)
    records = key(found, "records")
    for ticket, other in (("t000000002", "t000000004"), ("t000000004", "t000000007")):
        await found.redis.hset(records, ticket, await found.redis.hget(records, other))
    said = await complaint(found)
    assert "taken and recorded as ready" in said
    assert "ready and recorded as reserved" in said
    await live_on(found)


@pytest.mark.parametrize("name", ZSETS)
@pytest.mark.parametrize("score", SCORES)
async def test_scores_and_strangers_in_a_set_of_tickets(redis_buffer: Both, run_name: str, name: str, score: str):
    draw, found = seeded(), await scene(redis_buffer, run_name)
    members = await found.redis.zrange(key(found, name), 0, -1)
    stranger = draw.choice(STRANGERS)
    await found.redis.zadd(key(found, name), {stranger: score, **dict.fromkeys(members[:1], score)})
    said = await complaint(found)
    if name in ("reserved", "ready", "taken", "kept", "again", "lottery"):
        assert "tickets are" in said
    if name in ("reserved", "ready", "taken", "kept"):  # there was a ticket to move
        assert "under another number than recorded" in said
    await live_on(found)


@pytest.mark.parametrize("garbage", GARBAGE)
async def test_foreign_numbers_in_the_state_never_hold_the_server(redis_buffer: Both, run_name: str, garbage: bytes):
    fields = await cast("Any", redis_buffer[1].commands).hkeys(key(await scene(redis_buffer, run_name), "state"))
    for number, field in enumerate([*fields, b"samples_per_insert", b"wanted", b"quotas"]):
        found = await another_scene(redis_buffer, f"{run_name}-{number}")
        await found.redis.hset(key(found, "state"), field, garbage)
        await live_on(found)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ZSETS])
async def test_foreign_fields_and_values(redis_buffer: Both, run_name: str, name: str):
    draw = seeded()
    for number, garbage in enumerate(GARBAGE):
        found = await another_scene(redis_buffer, f"{run_name}-{number}")
        if name == "redo":
            await found.redis.lpush(key(found, name), garbage)
        else:
            there = await found.redis.hkeys(key(found, name))
            for field in (draw.choice([*there, b"x"]), draw.choice(STRANGERS)):
                await found.redis.hset(key(found, name), field, garbage)
        await live_on(found)


# -- the board ----------------------------------------------------------------------------------------------------------
async def test_foreign_messages_are_looked_behind(redis_buffer: Both, run_name: str):
    board, redis = RedisBoard(redis_buffer[1], run_name), cast("Any", redis_buffer[1].commands)
    topic = keys.topic(run_name, "news")
    for fields in ({"a": "b"}, *({"message": garbage} for garbage in GARBAGE), {"message": b"[" * 100_000}):
        await redis.xadd(topic, fields)
    assert [message for _, message in await board.read("news", "0", 0)] in ([], [{}])
    await board.post("news", {"number": 1})
    [*_, (position, message)] = await board.read("news", "0", 0)
    assert message == {"number": 1}
    await redis.xadd(topic, {"message": b"\xff"})
    assert await board.read("news", position, 0.05) == []
    await redis.delete(topic)
    await redis.set(topic, b"garbage")
    for call in (board.read("news", "0", 0), board.read("news", "0", 0.05), board.post("news", {})):
        with pytest.raises(AsyncRLError, match="WRONGTYPE"):
            await call


async def test_foreign_members_are_not_listed(redis_buffer: Both, run_name: str):
    board, redis = RedisBoard(redis_buffer[1], run_name), cast("Any", redis_buffer[1].commands)
    us = Member(id="us", host="h", version=0, device="cpu")
    await board.announce(us, 60)
    for number, said in enumerate([*GARBAGE, b'{"id": 5, "host": "h", "version": 0, "device": "cpu"}', None]):
        await redis.zadd(keys.key(run_name, "members"), {f"stranger-{number}": 9e15})
        if said is not None:
            await redis.hset(keys.key(run_name, "member_facts"), f"stranger-{number}", said)
    assert await board.members() == [us]


@pytest.mark.parametrize("garbage", GARBAGE)
async def test_foreign_versions_are_one_sentence(redis_buffer: Both, run_name: str, garbage: bytes):
    await started(redis_buffer[0])
    board, redis = RedisBoard(redis_buffer[1], run_name), cast("Any", redis_buffer[1].commands)
    await redis.hset(keys.key(run_name, "versions"), "0", garbage)
    for call in (board.live_version(), board.versions()):
        with pytest.raises(AsyncRLError, match="'versions' cannot be parsed"):
            await call


# -- the socket ---------------------------------------------------------------------------------------------------------
FRAMES = 10_000
FRAMES_PER_CONNECTION = 20
HARMLESS = ["PING", "GET", "HSET", "EVAL", "EVALSHA", "SUBSCRIBE", "XADD", "ZADD", "MULTI", "HELLO", "AUTH", "CLIENT"]


def frame(draw: random.Random) -> bytes:
    """Random bytes, or almost a command. None of them can name a key of a run or reconfigure the server."""
    if draw.random() < 0.5:
        return bytes(draw.choice((draw.randrange(128, 256), draw.choice(b"*$:+-\r\n 019"))) for _ in range(draw.randrange(60)))
    words = [draw.choice(HARMLESS).encode(), *(draw.randbytes(draw.randrange(6)) for _ in range(draw.randrange(4)))]
    lie = draw.choice((0, 0, 1, 2**31, -1))
    return b"*%d\r\n" % (len(words) + lie) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)


async def test_garbage_on_the_socket_leaves_the_buffer_as_it_is(run_name: str):
    draw = seeded()
    with private_server(find_binary()) as url:
        server = Server(url, patience_s=SILENT_S)
        found = await scene((RedisBuffer(server, run_name), server), run_name)
        for _ in range(FRAMES // FRAMES_PER_CONNECTION):
            reader, writer = await asyncio.open_unix_connection(url.removeprefix("unix://"))
            try:
                writer.write(b"".join(frame(draw) for _ in range(FRAMES_PER_CONNECTION)))
                writer.write_eof()
                async with asyncio.timeout(SILENT_S):
                    await reader.read()
            except (ConnectionError, BrokenPipeError):
                pass  # the server closed the connection
            finally:
                writer.close()
        assert await complaint(found) == ""
        batch = await found.buffer.take(found.fence, step=3, version=1, num_groups=2, wait_s=0)
        assert len(batch) == 2
        assert_ours(found, batch)
        await server.close()
