"""What a step reports beside its own numbers: the fleet's episodes, and what people read of a rollout."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from async_rl.telemetry import WORKER_METRICS
from async_rl.types import Message
from buffer.reference.memory_board import MemoryBoard
from buffer.reference.memory_buffer import MemoryBuffer
from learner.reporting.fleet_metrics import FleetMetrics
from learner.reporting.report import split_conversation


def spoken(*said: str) -> list[Message]:
    roles = {"s": "system", "u": "user", "a": "assistant"}
    return [Message(role=roles[each[0]], content=each[2:]) for each in said]


@pytest.mark.parametrize(
    ("conversation", "prompt", "text"),
    [
        (spoken("u:1+1=", "a:2"), "1+1=", "2"),
        (spoken("s:Add.", "u:1+1=", "a:2"), "1+1=", "2"),
        (spoken("s:Add.", "u:Hello.", "u:1+1=", "a:2", "u:Sure?", "a:Yes"), "Hello.\n1+1=", "2 Sure? Yes"),
        (spoken("s:Begin.", "a:2"), "Begin.", "2"),
        (spoken("u:1+1="), "1+1=", ""),
        ([], "", ""),
    ],
    ids=["text", "with a system message", "many turns", "nothing but a system message", "no answer", "nothing"],
)
def test_a_sample_shows_the_task_and_not_the_instructions_before_every_task(
    conversation: Sequence[Message], prompt: str, text: str
) -> None:
    assert split_conversation(conversation) == (prompt, text)


async def test_the_reward_of_all_episodes_counts_each_episode_in_one_row() -> None:
    board = MemoryBoard(MemoryBuffer())
    fleet = FleetMetrics(board)

    async def say(worker: str, scored: int, rewards: float) -> None:
        counters = {"scored/a": scored, "scored/b": 1, "reward_sum/a": rewards, "reward_sum/b": 0.5, "episodes": scored + 1}
        await board.post(WORKER_METRICS, {"worker": worker, "counters": counters})
        for _ in range(10):  # turns of the loop until the service has read it
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as tasks:
        service = tasks.create_task(fleet.run())
        await asyncio.sleep(0)
        assert "rollout/reward" not in fleet.row()
        await say("w1", 3, 1.5)
        assert fleet.row()["rollout/reward"] == pytest.approx((1.5 + 0.5) / 4)
        assert "rollout/reward" not in fleet.row(), "no episode has ended since"
        await say("w2", 1, 1.0)
        await say("w1", 5, 2.5)
        assert fleet.row()["rollout/reward"] == pytest.approx((1.5 + 1.0) / (2 + 2))
        service.cancel()


async def test_the_rate_of_sampling_is_that_of_the_last_seconds_and_not_of_the_last_snapshot() -> None:
    """Workers sample in bursts: between two snapshots there may be no token."""
    board = MemoryBoard(MemoryBuffer())
    fleet = FleetMetrics(board)
    async with asyncio.TaskGroup() as tasks:
        service = tasks.create_task(fleet.run())
        await asyncio.sleep(0)
        for tokens in (100, 900, 900, 900):
            await board.post(WORKER_METRICS, {"worker": "w", "counters": {"tokens": tokens}})
            for _ in range(10):  # turns of the loop until the service has read it
                await asyncio.sleep(0)
        assert fleet.row()["rollout/tok_s"] > 0
        await board.post(WORKER_METRICS, {"worker": "w", "counters": {"tokens": 5}})  # it began anew
        for _ in range(10):
            await asyncio.sleep(0)
        assert fleet.row()["rollout/tok_s"] == 0
        service.cancel()
