"""Groups that the buffer drops because they are too old are shown before, as far as they are few; nothing else changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from async_rl.types import TakenGroup
from buffer.payloads.files import PayloadFolder
from buffer.redis_buffer import RedisBuffer
from buffer.server.client import Server
from buffer.stale_groups import MOST
from tests.support.groups import group
from tests.support.runs import publish, started


@pytest.mark.parametrize("in_files", [False, True])
async def test_stale_groups_are_shown_before_they_are_dropped(
    redis_buffer: tuple[RedisBuffer, Server], run_name: str, tmp_path: Path, in_files: bool
) -> None:
    _, server = redis_buffer
    with PayloadFolder(tmp_path / "payloads", max_bytes=2**26) as folder:
        buffer, shown = RedisBuffer(server, run_name, payload_folder=folder if in_files else None), list[TakenGroup]()
        buffer.on_stale = shown.append
        fence = await started(buffer, max_age=1, groups_per_step=6)
        tickets = await buffer.reserve("w", version=0, count=10, wait_s=0)
        await publish(buffer, fence)
        for ticket in tickets:
            versions = (0,) * (9000 if in_files else 3) if ticket.task_index < 9 else (1,)
            assert await buffer.commit("w", group(ticket, versions=versions)) == "stored"
        await publish(buffer, fence)
        assert await buffer.take(fence, step=1, version=1, num_groups=99, wait_s=0) == []
        assert shown == [], "they may still be trained"
        await buffer.take(fence, step=1, version=2, num_groups=6, wait_s=0)
        assert (await buffer.stats()).dropped == {"stale": 9}
        assert [(each.group.id, each.task_index, each.attempt) for each in shown] == [
            (ticket.id, ticket.task_index, 1) for ticket in tickets[:MOST]
        ]
        assert all(each.group.oldest_version == 0 and each.group.rollouts[1].reward == 2.0 for each in shown)
