"""Engines in processes of their own read new weights where the learner packed them, or where their worker received them."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import torch

from async_rl.board.inbox import Inbox
from async_rl.config import CharacterTokenizer, WireConfig
from async_rl.config.rollout import WorkerConfig
from async_rl.protocols import GenerationArgs, Member
from async_rl.supervision.services import run_with
from async_rl.transport.messages import TO_LEARNER, TO_LEARNER_MESSAGES, PushReady
from async_rl.transport.packed_source import read_source
from async_rl.transport.receiving.receiver import WeightReceiver
from rollout_workers.inference.replicas import EngineFleet
from rollout_workers.inference.rollout_engine import placement_of
from tests.support.engine_stage import ALPHABET, CPU, DEFAULTS, SHAPE, TOKENIZER, prompts, recomputed, weights
from tests.support.rank_processes import ranks
from tests.support.waiting import eventually
from tests.support.wire_board import StageBoard, board_of
from tests.support.wire_weights import Sender, sending

RANKS = 2
OVER_GLOO = WireConfig(shared_memory=False, bucket_mb=0.01)


@asynccontextmanager
async def tensor_ranks() -> AsyncIterator[EngineFleet]:
    worker = WorkerConfig(engines=1, tensor=RANKS, kv_cache_gb=0.01, kv_block_tokens=8)
    environment = os.environ | {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "OMP_NUM_THREADS": "1"}
    async with EngineFleet(
        SHAPE, TOKENIZER, CharacterTokenizer(alphabet=ALPHABET), worker, DEFAULTS,
        devices=[CPU] * RANKS, seed=7, environment=environment,
    ) as running:  # fmt: skip
        yield running


def mapped_by_ranks() -> list[set[int]]:
    """For each rank process the inodes of weights that it has mapped."""
    lines = [Path(f"/proc/{process}/maps").read_text().splitlines() for process in ranks()]
    return [{int(line.split()[4]) for line in each if "memfd:async-rl-weights" in line} for each in lines]


def inode(address: str) -> int:
    return Path(address).stat().st_ino


async def samples_with(running: EngineFleet, full: Mapping[str, torch.Tensor]) -> None:
    """Check that the engine's log-probabilities are those of these weights."""
    for prompt in prompts(3):
        completion = await running.generate(prompt, GenerationArgs(max_tokens=12))
        assert {span.version for span in completion.versions} == {running.version}
        np.testing.assert_allclose(completion.logprobs, recomputed(full, prompt, completion), atol=1e-5)


async def stage(sender: Sender, version: int) -> None:
    await sender.wait_for_members_behind(version)
    report = await sender.push(version, dict(weights(version)))
    assert report.staged == ("worker",), report


async def served(running: EngineFleet, version: int) -> None:
    async def is_served() -> bool:
        return running.version == version

    await eventually(is_served, f"version {version} is served")
    await samples_with(running, weights(version))


async def follow_learners(board: StageBoard, running: EngineFleet) -> list[tuple[int, ...]]:
    """Serve two versions of each of two learners. Returns for each version the parcels that the worker read in place."""
    inbox = await Inbox.open(board, TO_LEARNER, TO_LEARNER_MESSAGES)
    async with sending(board, OVER_GLOO, weights(0), fence=1) as sender:
        for version in (0, 1):
            await stage(sender, version)
            await sender.flip(version)
            await served(running, version)
    async with sending(board, WireConfig(), weights(0), fence=2) as sender:
        for version in (2, 3):
            await stage(sender, version)
            await sender.flip(version)
            await served(running, version)
            packed, by_rank = inode(await address_of(board, version)), mapped_by_ranks()
            assert [packed in inodes for inodes in by_rank] == [True] * RANKS
    return [message.by_memory for message in await inbox.read() if isinstance(message, PushReady)]


async def address_of(board: StageBoard, version: int) -> str:
    """Where the learner has packed it."""
    source = await read_source(board)
    assert source is not None
    (packed,) = source.versions[version]
    return packed.address


async def test_ranks_read_received_weights_in_place(redis_server: str, run_name: str) -> None:
    async with board_of(redis_server, run_name) as board, tensor_ranks() as running:
        member = Member(id="worker", host="localhost", version=-1, device="cpu")
        receiver = WeightReceiver(
            board, board.store, member, running.specs, WireConfig(), lease_s=10.0, placement=placement_of(running)
        )
        in_place = await run_with(
            lambda: follow_learners(board, running),
            weights=lambda: receiver.run(running.swap),
            engine=running.watch,
        )
    assert in_place == [(), (), (0,), (0,)]
