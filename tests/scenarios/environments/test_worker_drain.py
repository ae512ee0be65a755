"""A worker that is told to stop among episodes that speak HTTP and never end: nothing is lost, and nothing is left open."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from aiohttp import ClientSession

from async_rl.config import BatchConfig
from async_rl.config.rollout import EnvironmentConfig, GatewayConfig, WorkerConfig
from async_rl.protocols import EpisodeContext, InferenceInterface
from async_rl.replay_protocol import Limits
from async_rl.testing import EchoAgent, ScriptedInference
from async_rl.types import Rollout, Status, Task, VersionRecord
from buffer.reference.memory_buffer import MemoryBuffer
from rollout_workers.episodes.task_mix import TaskMix
from rollout_workers.gateway import open_gateway
from rollout_workers.worker import Worker
from rollout_workers.worker_parts import WorkerParts


@dataclass(frozen=True, slots=True, kw_only=True)
class Client(EchoAgent):
    """Knows the model by its address only."""

    async def rollout(self, task: Task, inference: InferenceInterface, context: EpisodeContext) -> Rollout:
        assert context.gateway is not None
        async with context.gateway.session(inference) as session, ClientSession() as http:
            async with http.post(f"{session.base_url}/completions", json={"prompt": task.prompt}) as response:
                assert response.status == 200, await response.text()
            return Rollout(samples=session.samples(), reward=float(context.sibling), status=Status.OK)


async def test_sessions_that_hang_are_closed_and_their_tickets_handed_back() -> None:
    hanging = asyncio.Semaphore(0)

    async def answer(text: str) -> str:
        if text.startswith("1"):
            return "2"
        hanging.release()
        await asyncio.Event().wait()
        return ""

    buffer, stop = MemoryBuffer(), asyncio.Event()
    fence = await buffer.acquire("learner", Limits(max_age=0, groups_per_step=2, lease_s=30, max_attempts=1))
    await buffer.recover(fence, None)
    await buffer.publish(fence, VersionRecord(version=0, timeline="t", step=0, digest=""))
    before = asyncio.all_tasks()
    async with asyncio.timeout(60), open_gateway(GatewayConfig(), context_tokens=512, run_token="") as gateway:
        worker = Worker(
            WorkerParts(
                name="w0",
                buffer=buffer,
                inference=ScriptedInference(answer),
                tasks=TaskMix([(EnvironmentConfig(type="0"), Client())]),
                batch=BatchConfig(groups_per_step=2, group_size=2),
                settings=WorkerConfig(groups_in_flight=2, drain_s=0.2),
                seed=0,
                gateway=gateway,
            )
        )
        async with asyncio.TaskGroup() as working:
            working.create_task(worker.run(stop))
            for _ in range(2):
                await hanging.acquire()
            (good,) = await buffer.take(fence, step=1, version=0, num_groups=1, wait_s=30)
            stop.set()
        assert gateway.counters.snapshot()["gateway/sessions"] == 0
    assert asyncio.all_tasks() == before
    assert (good.group.task.prompt, [rollout.reward for rollout in good.group.rollouts]) == ("1", [0.0, 1.0])
    assert worker.counters.groups == {"stored": 1, "abandoned": 1}
    audit = await buffer.audit()
    assert (audit.problems, audit.stats.reserved) == ((), 0)
