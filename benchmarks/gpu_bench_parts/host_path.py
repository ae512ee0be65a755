"""The learner's host path: whether reading, packing and sending what it trains and pushes ever makes the GPU wait.

    process that commits groups ──▶ Redis ──▶ Prefetcher ──▶ Loop ──▶ ranks, whose kernels are traced
                                                              └─▶ Publisher ──▶ process that receives the weights

The loop, the buffer and the wire are those of a run; groups and receiver cost the GPU no generation, so that there are always
enough groups and what is left of idle time is the learner's own.
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import tempfile
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from buffer_parts.groups import under
from buffer_parts.server import server
from gpu_checks.learner_checks import REINFORCE
from gpu_checks.report import QWEN3_600M, SMALL, Checks, Machine, Report
from gpu_checks.wire_checks import receiving
from learner_parts.rollouts import groups_of, lognormal_lengths
from torch.autograd import DeviceType
from torch.distributed import HashStore, Store
from torch.profiler import ProfilerActivity, profile
from weights_parts.pipe_board import FENCE, PipeBoard

from async_rl.config import Config
from async_rl.megatron import parallel
from async_rl.megatron.parameters.full_parameters import specs
from async_rl.models.shape import ModelShape
from async_rl.transport.sending.sender import WeightSender
from async_rl.transport.wire.rendezvous import WIRE_STORE
from async_rl.types import RolloutGroup
from buffer.redis_buffer import RedisBuffer
from buffer.server.client import Server
from learner.batches.batch import pack_batch
from learner.loop import FinishedStep, Loop
from learner.packing.cost import cost_of
from learner.prefetch import Prefetcher
from learner.progress import Progress
from learner.ranks.rank_group_thread import RankGroupThread
from learner.versions.publish import Publisher
from learner.versions.push_policy import PushPolicy

RUN = "host-path"
WARM_UP = 3
"""First steps, in which kernels compile and the prefetch begins."""
GROUP_SIZE = 4
ANY_VERSION = 2**31
"""The version that the writer reports: never behind the live one."""
TO_AND_FROM_HOST = ("Memcpy HtoD", "Memcpy DtoH")
"""Copies for which the compute stream waits: no work of the GPU's own."""


@dataclass(frozen=True, slots=True)
class Busy:
    """A kernel or copy on one of the GPU's streams."""

    stream: int
    name: str
    start: float
    stop: float


def idle_share(work: Iterable[Busy]) -> float:
    """Return the share of time without a kernel on the stream that computes most, from its first kernel to its last."""
    streams: dict[int, list[tuple[float, float]]] = {}
    for each in work:
        if not each.name.startswith(TO_AND_FROM_HOST):
            streams.setdefault(each.stream, []).append((each.start, each.stop))
    spans = sorted(max(streams.values(), key=_covered))
    return 1 - _covered(spans) / (max(stop for _, stop in spans) - spans[0][0])


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    total, until = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, until))
        until = max(until, stop)
    return total


@dataclass(slots=True)
class _Steps:
    """Begins the trace after the first steps, and ends it `count` steps later."""

    count: int
    on_gpu: bool
    finished: list[FinishedStep] = field(default_factory=list[FinishedStep])
    done: asyncio.Event = field(default_factory=asyncio.Event)
    trace: profile | None = None

    async def after(self, step: FinishedStep) -> None:
        number = step.progress.step
        if WARM_UP < number <= WARM_UP + self.count:
            self.finished.append(step)
        if number == WARM_UP and self.on_gpu:
            self.trace = profile(activities=[ProfilerActivity.CUDA])
            self.trace.start()
        if number == WARM_UP + self.count:
            if self.trace is not None:
                self.trace.stop()
            self.done.set()

    def work(self) -> Iterator[Busy]:
        assert self.trace is not None
        for event in self.trace.events() or ():
            if event.device_type == DeviceType.CUDA:
                yield Busy(event.device_resource_id, event.name, event.time_range.start, event.time_range.end)


def host_path(machine: Machine, report: Report) -> None:
    """Train steps one after the other, each with a push, and trace them."""
    row, shape = (32768, replace(QWEN3_600M, max_positions=32768)) if machine.is_gpu else (256, SMALL)
    given: dict[str, Any] = {
        "model": {"size": {"hidden": 128, "layers": 4, "heads": 4}},  # replaced by the given shape
        "environments": [{"type": "even_digits"}],
        "batch": {"bin_tokens": row, "groups_per_step": 8 if machine.is_gpu else 2, "group_size": GROUP_SIZE},
        "staleness": {"max_age": 2},
        "learner": {"steps": 1000, "checkpoint_every": 1000, "recompute": "selective", "optimizer": {"learning_rate": 1e-5}},
    }
    lengths = lognormal_lengths(16 * GROUP_SIZE, median=row // 16, longest=row, seed=5)
    with tempfile.TemporaryDirectory() as folder, server() as where:
        config = Config.model_validate({**given, "run": {"folder": folder, "name": RUN}})
        taken = groups_of(lengths, group_size=GROUP_SIZE, vocab_size=shape.vocab_size, seed=3)
        with _writing(where, [each.group for each in taken]):
            asyncio.run(_measure(machine, report, config, shape, where))


async def _measure(machine: Machine, report: Report, config: Config, shape: ModelShape, where: str) -> None:
    steps = _Steps(count=20 if machine.is_gpu else 4, on_gpu=machine.is_gpu)
    async with _learner(machine, config, shape, where, steps) as publisher:
        await steps.done.wait()
        pushes, last = publisher.num_pushes, publisher.last_push
    report.require(last is not None and len(last.report.staged) == 1, "the weights were not pushed to the other process")
    waited = sum(each.idle_s for each in steps.finished)
    prepared = sum(each.step_batch.take_s + each.step_batch.packed.metrics["time/pack"] for each in steps.finished)
    report.note(
        steps=len(steps.finished), pushes=pushes, step_ms=1e3 * sum(each.step_s for each in steps.finished) / steps.count,
        prepared_ms=1e3 * prepared / steps.count, waited_ms=1e3 * waited / steps.count, hidden=1 - min(1.0, waited / prepared),
    )  # fmt: skip
    for cause in steps.finished[0].idle:
        report.note(**{cause.replace("/", "_"): sum(each.idle[cause] for each in steps.finished) / steps.count})
    if machine.is_gpu:
        report.note(gpu_idle=idle_share(steps.work()))
    else:
        report.note(gpu_idle="not measured (no GPU)")


@dataclass(frozen=True, slots=True)
class _Stores:
    """The weight wire meets where the board says, anything else within this process."""

    wire: Store

    def open(self, name: str) -> Store:
        return self.wire if name == WIRE_STORE else HashStore()


@asynccontextmanager
async def _learner(machine: Machine, config: Config, shape: ModelShape, where: str, steps: _Steps) -> AsyncIterator[Publisher]:
    """Run the learner's loop on the buffer at `where`, and a process that its weights are pushed to."""
    ours, theirs = multiprocessing.Pipe()
    board, connection = PipeBoard(ours), Server(where)
    buffer = RedisBuffer(connection, RUN)
    fence = await buffer.acquire(RUN, config.limits)
    await buffer.recover(fence, None)
    progress = Progress(step=0, version=await buffer.issue(fence, after=-1), timeline=RUN)
    wanted = specs(shape, parallel.resolve_dtype(machine.device))
    with receiving(theirs, machine.device, wanted, config.wire):
        stores, meet = _Stores(await board.make_store()), lambda: None
        async with (
            RankGroupThread.open(config, REINFORCE, shape, stores, life=FENCE, meet=meet) as ranks,
            asyncio.TaskGroup() as tasks,
        ):
            listening = tasks.create_task(board.listen())
            rank_sender = await ranks.open_sender()
            async with WeightSender(board, config.wire, rank_sender, fence=FENCE) as sender:
                while not await sender.wait_for_members_behind(progress.version):
                    pass
                publisher = Publisher(buffer=buffer, fence=fence, sender=sender, policy=PushPolicy.of(config))
                loop = _loop(config, shape, buffer, fence, ranks, publisher, steps)
                running = [tasks.create_task(publisher.run()), tasks.create_task(loop.run(progress))]
                yield publisher
                for task in running:
                    task.cancel()
                await asyncio.wait(running)
            listening.cancel()
    await connection.close()


def _loop(
    config: Config,
    shape: ModelShape,
    buffer: RedisBuffer,
    fence: int,
    ranks: RankGroupThread,
    publisher: Publisher,
    steps: _Steps,
) -> Loop:
    pack = partial(pack_batch, objective=REINFORCE, capacity=config.batch.bin_tokens, cost=cost_of(shape))
    prefetcher = Prefetcher(
        buffer=buffer, fence=fence, batch=config.batch, staleness=config.staleness, pack=pack, num_workers=lambda: 1
    )

    async def nothing(*_: object) -> None: ...

    return Loop(
        buffer=buffer, fence=fence, ranks=ranks, prefetcher=prefetcher, publisher=publisher, config=config.learner,
        record=nothing, record_rollback=nothing, report=steps.after, make_room=nothing, stop=asyncio.Event(),
    )  # fmt: skip


@contextmanager
def _writing(where: str, groups: Sequence[RolloutGroup]) -> Iterator[None]:
    """Run a process that commits these groups again and again, as soon as there are slots."""
    process = multiprocessing.get_context("spawn").Process(target=_write, args=(where, groups), daemon=True)
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()


def _write(where: str, groups: Sequence[RolloutGroup]) -> None:
    asyncio.run(_write_for_ever(where, groups))


async def _write_for_ever(where: str, groups: Sequence[RolloutGroup]) -> None:
    buffer, rolled_out = RedisBuffer(Server(where), RUN), itertools.cycle(groups)
    while True:
        for ticket in await buffer.reserve("writer", version=ANY_VERSION, count=4, wait_s=5.0):
            await buffer.commit("writer", under(ticket, next(rolled_out), "writer"))


CHECKS: Checks = {"host path": host_path}
