"""New weights arrive from another process while the engine generates: every token has the version it was sampled with."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from async_rl.config import WireConfig
from async_rl.config.rollout import WorkerConfig
from async_rl.protocols import GenerationArgs, Member
from async_rl.supervision.services import run_with
from async_rl.transport.receiving.receiver import WeightReceiver
from async_rl.types import Completion
from rollout_workers.inference.engine import MegatronEngine
from tests.support.engine_stage import ENDLESS, engine, prompts, recomputed, weights
from tests.support.warm_processes import running_module
from tests.support.wire_board import board_of

VERSIONS = 8
TOKENS = 40
RECOMPUTES = WorkerConfig(kv_cache_gb=0.01, kv_block_tokens=8, kv_on_swap="recompute")
"""After a flip nothing is left of the old weights, so that a forward pass under the new ones must say the same of a token."""

Answered = tuple[Sequence[int], Completion]


async def answers_until(running: MegatronEngine, version: int) -> list[Answered]:
    """Generations that follow each other without a pause, until one was sampled with that version alone."""

    async def answer(prompt: Sequence[int]) -> list[Answered]:
        found: list[Answered] = []
        while not found or found[-1][1].versions[0].version < version:
            found.append((prompt, await running.generate(prompt, GenerationArgs(max_tokens=TOKENS))))
        return found

    return [each for found in await asyncio.gather(*(answer(prompt) for prompt in prompts(4))) for each in found]


async def test_every_token_has_the_version_it_was_sampled_with(redis_server: str, run_name: str) -> None:
    async with board_of(redis_server, run_name) as board, engine(tokenizer=ENDLESS, worker=RECOMPUTES) as running:
        with running_module("tests.scenarios.wire.wire_pusher", redis_server, run_name, VERSIONS) as pusher:
            member = Member(id="worker", host="localhost", version=-1, device="cpu")
            receiver = WeightReceiver(board, board.store, member, running.specs, WireConfig(), lease_s=10.0)
            answers = await run_with(
                lambda: answers_until(running, VERSIONS - 1),
                weights=lambda: receiver.run(running.swap),
                engine=running.watch,
            )
            await asyncio.to_thread(pusher.join)
            assert pusher.exitcode == 0
    flips = 0
    for prompt, completion in answers:
        spans = completion.versions
        assert [spans[0].start, *(span.stop for span in spans)] == [*(span.start for span in spans), TOKENS]
        assert [span.version for span in spans] == sorted({span.version for span in spans})
        for span in spans:
            said = recomputed(weights(span.version), prompt, completion)[span.start : span.stop]
            np.testing.assert_allclose(completion.logprobs[span.start : span.stop], said, atol=1e-4)
        flips += len(spans) - 1
    assert flips > 0, "nothing flipped in the middle of a generation: this run showed nothing"
