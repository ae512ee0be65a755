"""Check of two engines in processes of their own on one device: they read the weights that their worker received there."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import string
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection

import numpy as np
import torch
from weights_parts.learner import learner
from weights_parts.pipe_board import PipeBoard

from async_rl.config import CharacterTokenizer, WireConfig
from async_rl.config.rollout import WorkerConfig
from async_rl.megatron import parallel
from async_rl.megatron.parameters.full_parameters import specs
from async_rl.protocols import GenerationArgs, Member
from async_rl.tokenization.tokenizers import open_tokenizer
from async_rl.transport.receiving.received_weights import ReceivedWeights
from async_rl.transport.receiving.receiver import WeightReceiver
from async_rl.transport.wire.gpus import gpus_of
from async_rl.types import Completion, StopReason, VersionSpan
from gpu_checks.engine_checks import DEFAULTS, MISMATCH, mismatch, prompts, weights
from gpu_checks.report import SMALL, Checks, Machine, Report
from gpu_checks.wire_checks import said
from rollout_workers.inference.replicas import EngineFleet

TOKENIZER = CharacterTokenizer(alphabet=string.printable[: SMALL.vocab_size - 4])
ENGINES, VERSIONS, TOKENS = 2, 2, 24


def push_ranks(machine: Machine, report: Report) -> None:
    """Push to such a worker, which reads the learner's memory or receives over gloo; its engines sample with each version."""
    for name, wire in (("in_place", WireConfig()), ("gloo", WireConfig(shared_memory=False))):
        ours, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process(target=_worker, args=(theirs, str(machine.device), wire))
        process.start()
        try:
            asyncio.run(_push(machine, report, ours, name, wire))
        finally:
            process.kill()
            process.join()


async def _push(machine: Machine, report: Report, pipe: Connection, name: str, wire: WireConfig) -> None:
    board, dtype = PipeBoard(pipe), parallel.resolve_dtype(machine.device)
    asked = _asked()
    async with learner(board, wire, _sent(machine, dtype, seed=0)) as end:
        for version in range(VERSIONS):
            full = _sent(machine, dtype, seed=version)
            pushed = await end.push(full, workers=1)
            await end.flip(pushed)
            served = dict(await said(board, "served", version))
            report.note(**{f"{name}_swap_s": served.pop("swap_s")})
            found = [_completion(version, *each) for each in served.pop("found")]
            report.require(
                served == {"version": version, "is_there": True, "is_shared": True, "loads": [len(asked) // ENGINES] * ENGINES},
                f"served {served}",
            )
            largest, mean = MISMATCH[dtype]
            difference = mismatch(machine, SMALL, dtype, full, asked, found)
            report.at_most(f"{name}_max_{version}", difference.max().item(), largest)
            report.at_most(f"{name}_mean_{version}", difference.mean().item(), mean)


def _sent(machine: Machine, dtype: torch.dtype, seed: int) -> dict[str, torch.Tensor]:
    full = weights(machine, SMALL, dtype, seed)
    return {spec.name: full[spec.name] for spec in specs(SMALL, dtype)}


def _asked() -> list[list[int]]:
    return prompts(8, SMALL.vocab_size, longest=40)


def _completion(version: int, token_ids: list[int], logprobs: list[float]) -> Completion:
    return Completion(
        token_ids=np.array(token_ids, np.int32),
        logprobs=np.array(logprobs, np.float32),
        versions=(VersionSpan(version=version, start=0, stop=len(token_ids)),),
        stop_reason=StopReason.LENGTH,
        text="",
    )


def _worker(pipe: Connection, device_name: str, wire: WireConfig) -> None:
    torch.set_num_threads(1)
    asyncio.run(_serve(pipe, torch.device(device_name), wire))


async def _serve(pipe: Connection, device: torch.device, wire: WireConfig) -> None:
    worker = WorkerConfig(engines=ENGINES, kv_cache_gb=0.1)
    async with EngineFleet(
        SMALL, open_tokenizer(TOKENIZER), TOKENIZER, worker, DEFAULTS,
        devices=[device] * ENGINES, seed=7, environment=os.environ, num_parcels=1,
    ) as engines:  # fmt: skip
        board, gpus = PipeBoard(pipe), gpus_of(engines.placement.devices)
        member = Member(id="worker", host="localhost", version=-1, device=str(engines.device), gpus=gpus)

        async def swap(version: int, arrived: Mapping[str, torch.Tensor]) -> None:
            assert isinstance(arrived, ReceivedWeights)
            started = time.perf_counter()
            await engines.swap(version, arrived)
            swap_s = time.perf_counter() - started
            args = GenerationArgs(max_tokens=TOKENS)
            tasks = [asyncio.create_task(engines.generate(prompt, args)) for prompt in _asked()]
            await asyncio.sleep(0)
            loads = list(engines.loads)
            found = [(each.token_ids.tolist(), each.logprobs.tolist()) for each in await asyncio.gather(*tasks)]
            is_there = {tensor.device.type for tensor in arrived.values()} == {device.type}
            served = {"version": version, "is_there": is_there, "is_shared": all(arrived.addresses), "loads": loads}
            await board.post("served", served | {"found": found, "swap_s": swap_s})

        async with asyncio.TaskGroup() as services:
            services.create_task(board.listen())
            services.create_task(engines.watch())
            receiver = WeightReceiver(
                board, await board.store(), member, engines.specs, wire, lease_s=60, placement=engines.placement
            )
            await receiver.run(swap)


CHECKS: Checks = {"push ranks": push_ranks}
