"""Calls each script at least once a step, with 64 groups per step and real payloads, to show its largest realistic cost.

One client calls one script after the other, so it does not compete with the server for a core.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import Any, cast

from async_rl.protocols import Member
from async_rl.replay_protocol import Limits
from async_rl.types import BufferPosition, RolloutGroup, Ticket, VersionRecord
from buffer import keys
from buffer.board import RedisBoard
from buffer.redis_buffer import RedisBuffer
from buffer.server.client import Server
from buffer_parts.groups import group, under
from buffer_parts.script_log import script_log
from buffer_parts.server import server

RUN = "rehearsal"
TOKENS = 2048
GROUPS_PER_STEP = 64
LIMITS = Limits(
    max_age=2, groups_per_step=GROUPS_PER_STEP, lease_s=600, max_attempts=3, selector="windowed_fifo", max_uses=2, keep_steps=2
)
WORKERS = 8
PATIENCE_S = 30.0


def script_us(steps: int) -> dict[str, list[int]]:
    """Script -> microseconds of each call."""
    with server() as where, script_log(where) as costs:
        asyncio.run(_rehearse(where, steps))
    return costs


@dataclass(slots=True)
class _Stage:
    server: Server
    buffer: RedisBuffer
    board: RedisBoard
    rolled_out: RolloutGroup
    fence: int = 0
    version: int = -1
    position: BufferPosition | None = None
    held: dict[str, list[Any]] = field(default_factory=dict)
    """Worker -> its tickets."""


async def _rehearse(where: str, steps: int) -> None:
    connection = Server(where)
    stage = _Stage(connection, RedisBuffer(connection, RUN), RedisBoard(connection, RUN), group(TOKENS, seed=0))
    await _take_over(stage)
    for step in range(1, steps + 1):
        await _roll_out(stage, step)
        await _train(stage, step)
        await _look_around(stage)
    await stage.buffer.resign(stage.fence)
    await _take_over(stage)
    await cast("Any", connection.commands).flushall()
    await _take_over(stage)  # on an empty server, where every outstanding task is rolled again
    await connection.close()


async def _take_over(stage: _Stage) -> None:
    stage.fence = await stage.buffer.acquire("rehearsal", LIMITS)
    await stage.buffer.recover(stage.fence, stage.position)
    await _publish(stage, 0 if stage.position is None else stage.position.step)


async def _publish(stage: _Stage, step: int) -> None:
    stage.version = await stage.buffer.issue(stage.fence, after=stage.version)
    record = VersionRecord(version=stage.version, timeline="rehearsal", step=step, digest="")
    await stage.buffer.publish(stage.fence, record)


async def _roll_out(stage: _Stage, step: int) -> None:
    """Commit all tickets; per step one fails, one has no signal, and three are invalid, each in another way."""
    buffer = stage.buffer
    share = LIMITS.slots // WORKERS
    tickets = []
    for index in range(WORKERS):
        worker = f"worker{index}"
        found = await buffer.reserve(worker, version=stage.version, count=int(share), wait_s=0)
        await buffer.renew(worker, [ticket.id for ticket in found])
        tickets += [(worker, ticket) for ticket in found]
    groups = [(worker, under(ticket, stage.rolled_out, worker)) for worker, ticket in tickets]
    (failed, no_signal, unsound, early, spoilt), sound = groups[:5], groups[5:]
    await buffer.abandon(failed[0], failed[1].id, "failed")
    await buffer.commit(*no_signal, keep=False)
    await buffer.commit(unsound[0], replace(unsound[1], rollouts=()))
    await buffer.commit(early[0], _sampled_too_early(early[1]))
    for worker, one in [spoilt, *sound]:
        await buffer.commit(worker, one)
    await cast("Any", stage.server.commands).hset(keys.key(RUN, "payloads"), spoilt[1].id, b"spoilt")


def _sampled_too_early(group: RolloutGroup) -> RolloutGroup:
    """Commit a group of a version that is not live yet: quarantined now, valid after the next publish."""
    version = group.newest_version + 1
    return under(Ticket(id=group.id, task_index=0, version=version, attempt=1), group, group.worker)


async def _train(stage: _Stage, step: int) -> None:
    buffer, fence = stage.buffer, stage.fence
    await buffer.hold(fence)
    groups = await buffer.take(fence, step=step, version=stage.version, num_groups=GROUPS_PER_STEP, wait_s=PATIENCE_S)
    await buffer.prioritize(fence, {one.group.id: 2.0 for one in groups})
    await _publish(stage, step)
    await buffer.release(fence, step)
    stage.position = await buffer.position(fence, step)
    await buffer.checkpoint(fence, step)
    await buffer.discard(fence, [spent.id for spent in await buffer.spent_groups(GROUPS_PER_STEP)])


async def _look_around(stage: _Stage) -> None:
    buffer, board = stage.buffer, stage.board
    await buffer.stats()
    await buffer.change_limits({"lease_s": 600})
    refused = [report["ticket"] for report in await buffer.quarantined()]
    for ticket in refused:
        await buffer.readmit(ticket)
    await buffer.forget(refused)
    member = Member(id="worker", host="here", version=stage.version, device="cpu")
    await board.agree("worker", {"tokenizer": "characters"})
    await board.announce(member, 10.0)
    await board.members()
    await board.post("news", {"step": stage.version})
    await board.live_version()
    await board.leave(member.id)
