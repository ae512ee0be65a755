"""Measures the effect of pushes from another process on a decoding engine: throughput, and the pause at a flip.

A window is the same work every time, a batch of generations of fixed length: without pushes, with one every second, and with
one after the other. What a push costs while it is on its way is taken from those with one every second: the rate of
steps from the order to pack until the flip, whose pause is given apart, beside the rate in between, so that a machine whose
speed drifts says nothing wrong. Engine and learner have one thread each; the learner's also does what packing and sending take.
"""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import statistics
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Any

import torch

from async_rl.config import WireConfig
from async_rl.config.rollout import WorkerConfig
from async_rl.models.parameter_spec import ParameterSpec
from async_rl.models.shape import ModelShape
from async_rl.protocols import GenerationArgs, Member, Tokenizer
from async_rl.supervision import keep_pauses_short
from async_rl.tokenization.tokenizers import Characters
from async_rl.transport.receiving.receiver import WeightReceiver
from async_rl.transport.wire.gpus import gpus_of
from async_rl.types import Completion
from rollout_workers.inference.engine import MegatronEngine
from rollout_workers.inference.engine_core import EngineCore
from weights_parts.learner import learner
from weights_parts.pipe_board import PipeBoard

CPU = torch.device("cpu")
SHAPE = ModelShape(
    hidden=384, layers=6, heads=6, kv_heads=6, head_dim=64, ffn=1024, vocab_size=96, max_positions=128, rope_theta=1e4,
)  # fmt: skip


class Endless(Characters):
    """Nothing ends a generation but its limit."""

    end_id = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a window decodes: generations of fixed length, of a model on a device where the learner's process also is."""

    shape: ModelShape = SHAPE
    tokenizer: Tokenizer = field(default_factory=lambda: Endless("".join(map(chr, range(33, 33 + 90)))))
    device: torch.device = CPU
    batch: int = 48
    tokens: int = 64
    kv_cache_gb: float = 0.5
    every_s: float = 1.0
    """From one push to the next, in the windows that have room for decoding in between."""


@dataclass(frozen=True, slots=True)
class Spell:
    start: float
    stop: float

    @property
    def seconds(self) -> float:
        return self.stop - self.start

    def within(self, others: Sequence[Spell]) -> float:
        """Which part of it."""
        shared = sum(max(0.0, min(self.stop, other.stop) - max(self.start, other.start)) for other in others)
        return shared / self.seconds


class TimedCore(EngineCore):
    steps: list[Spell]
    pauses: list[Spell]
    """Decoding waits for the weights of a flip."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.steps, self.pauses = [], []

    def step(self) -> None:
        started = time.perf_counter()
        super().step()
        self.steps.append(Spell(started, time.perf_counter()))

    def swap(self, number: int, tensors: Mapping[str, torch.Tensor]) -> None:
        started = time.perf_counter()
        super().swap(number, tensors)
        self.pauses.append(Spell(started, time.perf_counter()))


class Decoding:
    """An engine and its end of the wire; pushes come when it asks for them."""

    def __init__(self, engine: MegatronEngine, core: TimedCore, board: PipeBoard, work: Work) -> None:
        self._engine, self.core, self._board, self._work = engine, core, board, work
        self._flipped = asyncio.Event()
        self.pushes: list[Spell] = []
        """From the order to pack until the flip."""
        self.versions_seen = 0

    async def swap(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        await self._engine.swap(version, tensors)
        self._flipped.set()

    async def pushed(self) -> None:
        self._flipped.clear()
        started = time.perf_counter()
        await self._board.post("wanted", {})
        await self._flipped.wait()
        self.pushes.append(Spell(started, time.perf_counter()))

    async def window(self, every_s: float | None) -> float:
        """Seconds for the work, with a push that often; None without any. It is repeated until `pushes` has one."""
        async with asyncio.TaskGroup() as beside:
            pushes = beside.create_task(self._push_on(every_s)) if every_s is not None else None
            started, times = time.perf_counter(), 0
            while times == 0 or (pushes is not None and not self.pushes):
                await self._decode()
                times += 1
            seconds = (time.perf_counter() - started) / times
            if pushes is not None:
                pushes.cancel()
        return seconds

    async def _decode(self) -> None:
        args = GenerationArgs(max_tokens=self._work.tokens)
        prompts = ([4 + number % 90] * 8 for number in range(self._work.batch))
        answers = await asyncio.gather(*(self._engine.generate(prompt, args) for prompt in prompts))
        self.versions_seen = max(self.versions_seen, *(_versions_of(answer, self._work.tokens) for answer in answers))

    async def _push_on(self, every_s: float) -> None:
        await asyncio.sleep(every_s / 2)  # the first steps read the prompts, and take longer
        while True:
            pace = asyncio.create_task(asyncio.sleep(every_s))
            await self.pushed()
            await pace


def _versions_of(answer: Completion, tokens: int) -> int:
    """How many its tokens were sampled with; every token has one, and none goes back."""
    spans = answer.versions
    assert (spans[0].start, spans[-1].stop) == (0, tokens)
    assert all(one.stop == other.start and one.version < other.version for one, other in pairwise(spans))
    return len(spans)


def in_flight_figures(rounds: int, wire: WireConfig, work: Work | None = None) -> dict[str, float]:
    return asyncio.run(_figures(rounds, wire, work if work is not None else Work()))


async def _figures(rounds: int, wire: WireConfig, work: Work) -> dict[str, float]:
    found: dict[str, list[float]] = defaultdict(list)
    async with _decoding(wire, work) as decoding:
        core = decoding.core
        for number in range(-1, rounds):
            core.steps.clear()
            quiet_s = await decoding.window(None)
            step_s = statistics.median(step.seconds for step in core.steps)
            for spells in (core.steps, core.pauses, decoding.pushes):
                spells.clear()
            paced_s = await decoding.window(work.every_s)
            during = _during(core.steps, decoding.pushes, core.pauses, work.every_s)
            pauses = [pause.seconds for pause in core.pauses]
            unpaced_s = await decoding.window(0.0)
            if number >= 0:  # the first round warms everything up
                found["in_flight_throughput_during_pushes"].append(during)
                found["in_flight_throughput"].append(quiet_s / paced_s)
                found["in_flight_throughput_back_to_back"].append(quiet_s / unpaced_s)
                found["flip_pause_vs_step"].append(statistics.fmean(pauses) / step_s)
                found["flip_pause_ms"].append(1e3 * statistics.fmean(pauses))
                found["longest_flip_pause_ms"].append(1e3 * max(pauses))
                found["push_ms"].append(1e3 * statistics.fmean(push.seconds for push in decoding.pushes))
                found["step_ms"].append(1e3 * step_s)
                found["decoded_tokens_per_s"].append(work.batch * work.tokens / quiet_s)
        versions = decoding.versions_seen
    return {name: statistics.median(values) for name, values in found.items()} | {"versions_in_one_generation": versions}


def _during(steps: Sequence[Spell], pushes: Sequence[Spell], pauses: Sequence[Spell], every_s: float) -> float:
    """The rate of steps while a push is on its way, beside the rate in between."""
    first, last = pushes[0].start, pushes[-1].stop
    meanwhile = [step for step in steps if first - every_s / 2 < step.start and step.stop < last + every_s / 2]
    beside = sum(step.within(pushes) for step in meanwhile)
    pushing_s, paused_s = (sum(spell.seconds for spell in spells) for spells in (pushes, pauses))
    between_s, between = meanwhile[-1].stop - meanwhile[0].start - pushing_s, len(meanwhile) - beside
    if min(between_s, between) <= 0:
        return math.nan  # a push was on its way all the time
    return (beside / (pushing_s - paused_s)) / (between / between_s)


@asynccontextmanager
async def _decoding(wire: WireConfig, work: Work) -> AsyncIterator[Decoding]:
    ours, theirs = multiprocessing.Pipe()
    cores: list[TimedCore] = []

    def build(**arguments: Any) -> EngineCore:
        cores.append(TimedCore(**arguments))
        return cores[0]

    engine = MegatronEngine(
        work.shape, work.tokenizer, WorkerConfig(kv_cache_gb=work.kv_cache_gb),
        GenerationArgs(max_tokens=work.tokens, temperature=1.0, top_p=1.0, top_k=0, stop=()),
        device=work.device, seed=0, core=build,
    )  # fmt: skip
    async with engine:
        given = (theirs, str(work.device), engine.specs, wire)
        process = multiprocessing.get_context("spawn").Process(target=_learn, args=given, daemon=True)
        process.start()
        try:
            board = PipeBoard(ours)
            decoding = Decoding(engine, cores[0], board, work)
            device, gpus = str(work.device), gpus_of([work.device])
            member = Member(id="worker", host="localhost", version=-1, device=device, gpus=gpus)
            async with asyncio.TaskGroup() as services:
                listening = services.create_task(board.listen())
                receiver = WeightReceiver(board, await board.store(), member, engine.specs, wire, lease_s=60)
                following = [
                    listening,
                    services.create_task(receiver.run(decoding.swap)),
                    services.create_task(engine.watch()),
                ]
                await decoding.pushed()
                keep_pauses_short()  # as the mains of both ends do
                yield decoding
                for task in following:
                    task.cancel()
        finally:
            process.kill()
            process.join()


def _learn(pipe: Connection, device_name: str, specs: Sequence[ParameterSpec], wire: WireConfig) -> None:
    torch.set_num_threads(1)
    asyncio.run(_push_when_wanted(pipe, torch.device(device_name), specs, wire))


async def _push_when_wanted(pipe: Connection, device: torch.device, specs: Sequence[ParameterSpec], wire: WireConfig) -> None:
    weights = {spec.name: torch.randn(spec.shape, device=device).to(getattr(torch, spec.dtype)) / 30 for spec in specs}
    board = PipeBoard(pipe)
    async with learner(board, wire, weights) as end:
        keep_pauses_short()
        served = 0
        while True:
            for _ in await board.read("wanted", str(served), 5.0):
                await end.flip(await end.push(weights, workers=1))
                served += 1
