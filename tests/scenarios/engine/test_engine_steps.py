"""An engine's core step by step, at moments that traffic seldom meets: a cache that is full, prompts in chunks, a swap."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch

from async_rl.protocols import GenerationArgs
from async_rl.types import Completion
from rollout_workers.inference.engine_core import EngineCore
from rollout_workers.inference.generation import Generation, resolve
from tests.support.engine_stage import CPU, ENDLESS, SCHEDULES_ASYNC, SHAPE, cache_of, weights

MOST_STEPS = 300


class Stepped:
    """A core that the test steps. Blocks have eight tokens."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.ended: list[Completion] = []
        self._ids = count()

    def submit(self, prompt: Sequence[int], max_tokens: int) -> Generation:
        sampling = resolve(GenerationArgs(max_tokens=max_tokens), prompt_length=len(prompt), context_tokens=SHAPE.max_positions)
        generation = Generation(id=next(self._ids), prompt=prompt, sampling=sampling, finish=self.ended.append)
        self.core.submit(generation)
        return generation

    def steps(self, number: int) -> None:
        for _ in range(number):
            self.core.step()

    def drain(self) -> None:
        for _ in range(MOST_STEPS):
            if not self.core.can_step:
                return
            self.core.step()
        raise AssertionError("it never ends")


@contextmanager
def stepped(blocks: int, **settings: Any) -> Iterator[Stepped]:
    core = EngineCore(
        shape=SHAPE, tokenizer=ENDLESS, worker=cache_of(blocks=blocks).model_copy(update={"cuda_graphs": "never", **settings}),
        device=CPU, dtype=torch.float32, seed=1, layer_spec="local",
    )  # fmt: skip
    try:
        core.swap(0, weights(0))
        yield Stepped(core)
    finally:
        core.close()


def test_a_partly_computed_prompt_that_is_cancelled_after_a_swap_leaves_nothing_behind() -> None:
    with stepped(40, prompt_tokens_per_step=8, max_running=4) as engine:
        engine.submit([4] * 3, 40)
        engine.steps(1)
        partial = engine.submit([5] * 30, 4)
        engine.steps(1)
        engine.core.swap(1, weights(1))
        engine.core.cancel(partial)
        engine.drain()
        assert [len(each.token_ids) for each in engine.ended] == [40]


@SCHEDULES_ASYNC
def test_a_prompt_whose_next_chunk_has_no_room_waits_while_others_decode() -> None:
    with stepped(12, prompt_tokens_per_step=8, max_running=4, async_scheduling=True, prefix_reuse=False) as engine:
        for number in range(3):
            engine.submit([4 + number] * 5, 50)  # a block each, which is nearly full
        engine.steps(3)
        engine.submit([7] * 57, 3)
        engine.drain()
        assert sorted(len(each.token_ids) for each in engine.ended) == [3, 50, 50, 50]


def test_a_chunk_that_ends_within_a_known_block_leaves_its_prefix_evictable() -> None:
    prompt = list(range(4, 20))  # two blocks, of which the end is computed anyway
    with stepped(16, prompt_tokens_per_step=4, max_running=2, prefix_reuse=True) as engine:
        for _ in range(2):
            engine.submit(prompt, 2)
            engine.drain()
        for token in (5, 7):
            engine.submit([token] * 3, 61)  # they need the whole cache
        engine.drain()
        assert [len(each.token_ids) for each in engine.ended] == [2, 2, 61, 61]


def test_an_engine_of_one_generation_and_one_prompt_token_per_step_admits_a_known_prompt() -> None:
    with stepped(24, prompt_tokens_per_step=1, max_running=1, prefix_reuse=True) as engine:
        for _ in range(2):
            engine.submit(list(range(4, 15)), 1)
            engine.drain()
        assert len(engine.ended) == 2


def test_siblings_that_share_their_prefix_are_not_preempted_while_there_is_room() -> None:
    prompt = [4 + number % 30 for number in range(41)]
    with stepped(60, prompt_tokens_per_step=4096, max_running=64, prefix_reuse=True) as engine:
        for _ in range(16):
            engine.submit(prompt, 20)
        engine.drain()
        assert len(engine.ended) == 16
        assert engine.core.metrics.preemptions == 0
