"""How many versions are in a learner's memory while a push takes longer than its steps: a GPU has no room for all."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import torch

from async_rl.models.parameter_spec import ParameterSpec
from async_rl.replay_protocol import Limits
from async_rl.transport.packed_versions import PackedVersions
from async_rl.transport.plan import Box, plan_layout
from async_rl.transport.sending.sender import PushReport
from async_rl.transport.wire.shared_memory import ParcelMemory
from async_rl.types import VersionRecord
from buffer.reference.memory_buffer import MemoryBuffer
from learner.progress import Progress
from learner.versions.publish import PackedVersion, Publisher
from learner.versions.push_policy import PushPolicy
from tests.unit.learner.test_loop import NoWorkers, known

SPEC = ParameterSpec(name="weight", shape=(8, 8), dtype="bfloat16")
WEIGHT = Box.whole(SPEC)


class SlowWorkers(NoWorkers):
    """The push of version 2 ends when it is told to."""

    def __init__(self) -> None:
        self.pushed: list[int] = []
        self.has_begun, self.may_end = asyncio.Event(), asyncio.Event()

    async def push(self, record: VersionRecord) -> PushReport:
        self.pushed.append(record.version)
        if record.version == 2:
            self.has_begun.set()
            await self.may_end.wait()
        return await super().push(record)


def in_memory() -> int:
    gc.collect()
    return sum(isinstance(each, ParcelMemory) for each in gc.get_objects())


async def test_a_version_whose_push_has_not_begun_gives_way_to_the_next() -> None:
    buffer, workers = MemoryBuffer(), SlowWorkers()
    fence = await buffer.acquire("learner", Limits(max_age=9, groups_per_step=2, lease_s=60.0, max_attempts=2))
    sender: Any = workers
    publisher = Publisher(buffer=buffer, fence=fence, sender=sender, policy=PushPolicy(max_steps=9))
    layout = plan_layout([SPEC], {0: [WEIGHT]})
    versions = PackedVersions(layout, layout.parcels[0], torch.device("cpu"), shared=False)
    before = in_memory()
    running = asyncio.create_task(publisher.run())

    async def step(version: int) -> None:
        publisher.progress = Progress(step=version, version=version, timeline="t")
        versions.add(version, {WEIGHT: torch.zeros(8, 8, dtype=torch.bfloat16)}, keep=publisher.make_room())
        await asyncio.sleep(0)  # a version that was given up is not pushed meanwhile
        publisher.offer(PackedVersion(version=version, timeline="t", step=version, digest=known("d")), releases=version)

    try:
        await step(1)
        await publisher.until_live(1)
        for version in range(2, 6):
            await step(version)
            await workers.has_begun.wait()
        assert [versions.has(version) for version in range(1, 6)] == [True, True, False, False, True]
        assert in_memory() - before == 3, "the live one, the one that is pushed, and the newest"
        workers.may_end.set()
        await publisher.until_live(5)
        assert workers.pushed == [1, 2, 5]
        assert publisher.num_coalesced == 2
        for version in (6, 7):
            await step(version)
            await publisher.until_live(version)
        assert in_memory() - before == 2, "the live one, and the one that is pushed"
    finally:
        running.cancel()
