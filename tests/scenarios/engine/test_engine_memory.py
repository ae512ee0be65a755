"""What the engine does with its KV cache never shows in what it samples: chunks, shared prefixes, preemption, swaps."""

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from async_rl.config.rollout import WorkerConfig
from async_rl.protocols import GenerationArgs
from async_rl.types import Completion, spans_of
from rollout_workers.inference.engine import MegatronEngine
from rollout_workers.inference.rollout_engine import EngineMetrics
from tests.support.engine_stage import (
    ENDLESS,
    MEGATRON_SCHEDULES,
    SHAPE,
    Gate,
    cache_of,
    engine,
    prompts,
    recomputed,
    weights,
)

BLOCK = 8
OLD, NEW = 0, 1
ours = pytest.mark.skipif(MEGATRON_SCHEDULES, reason="this version of megatron-core schedules in its own way")


def settings(**changed: object) -> WorkerConfig:
    return WorkerConfig.model_validate({"kv_cache_gb": 0.01, "kv_block_tokens": BLOCK} | changed)


def is_exact(prompt: Sequence[int], completion: Completion, seed: int = 1) -> None:
    np.testing.assert_allclose(completion.logprobs, recomputed(weights(seed), prompt, completion), atol=1e-4)


async def at_rest(running: MegatronEngine) -> EngineMetrics:
    """Completions leave in the middle of a step; a swap comes between two."""
    await running.swap(running.version + 1, weights(1))
    return running.metrics


async def sampled(running: MegatronEngine, asked: Sequence[Sequence[int]], max_tokens: int = 6) -> list[Completion]:
    return await asyncio.gather(*(running.generate(prompt, GenerationArgs(max_tokens=max_tokens)) for prompt in asked))


@ours
@pytest.mark.parametrize("chunk", [3, BLOCK])
async def test_prompts_in_chunks(chunk: int) -> None:
    asked = prompts(12, longest=40)
    async with engine(tokenizer=ENDLESS, worker=settings(prompt_tokens_per_step=chunk)) as running:
        await running.swap(0, weights(1))
        found = await sampled(running, asked)
        steps = running.metrics.steps
    assert steps >= sum(map(len, asked)) / chunk
    for prompt, completion in zip(asked, found, strict=True):
        is_exact(prompt, completion)


@ours
async def test_a_long_prompt_does_not_stop_those_who_decode() -> None:
    long = (prompts(1)[0] * SHAPE.max_positions)[:50]
    gate = Gate(after=2)
    async with engine(tokenizer=gate, worker=settings(prompt_tokens_per_step=2)) as running:
        await running.swap(0, weights(1))
        short = asyncio.ensure_future(running.generate([5], GenerationArgs(max_tokens=20)))
        await gate.reached.wait()
        late = asyncio.ensure_future(running.generate(long, GenerationArgs(max_tokens=1)))
        await asyncio.sleep(0)
        gate.open()
        await short
        assert not late.done()  # 25 steps for its prompt; 18 for the rest of the other
        found = await late
    is_exact(long, found)


async def test_siblings_share_the_blocks_of_their_prompt() -> None:
    prompt = (prompts(1)[0] * SHAPE.max_positions)[: 3 * BLOCK]
    async with engine(tokenizer=ENDLESS, worker=settings()) as running:
        await running.swap(0, weights(1))
        found = await sampled(running, [prompt] * 6, max_tokens=30)
        assert running.metrics.prefix_tokens_reused == 5 * 2 * BLOCK  # the last token of a prompt is always computed
        assert (await at_rest(running)).kv_blocks_used == 0
    for completion in found:
        is_exact(prompt, completion)
    assert len({completion.token_ids.tobytes() for completion in found}) > 1


def row_of(length: int, first: int = 4) -> list[int]:
    return [first + position % 30 for position in range(length)]


@ours
async def test_a_full_cache_forgets_the_end_of_a_prefix_first() -> None:
    async with engine(tokenizer=ENDLESS, worker=cache_of(blocks=11)) as running:
        await running.swap(0, weights(1))
        one = GenerationArgs(max_tokens=1)
        await running.generate(row_of(5 * BLOCK), one)
        await running.generate(row_of(6 * BLOCK + 1, first=5), one)  # seven of ten blocks, two of them the other's
        before = running.metrics.prefix_tokens_reused
        await running.generate(row_of(5 * BLOCK), one)
        assert running.metrics.prefix_tokens_reused - before == 3 * BLOCK


async def test_requests_take_the_blocks_of_remembered_prefixes_without_a_pause() -> None:
    tokens = 4 * BLOCK - 2
    async with engine(tokenizer=ENDLESS, worker=cache_of(blocks=21)) as running:
        await running.swap(0, weights(1))
        for first in range(4, 10):
            await running.generate(row_of(5 * BLOCK, first), GenerationArgs(max_tokens=1))
        before = running.metrics.steps
        found = await sampled(running, [row_of(2, first) for first in range(6, 10)], max_tokens=tokens)
        assert running.metrics.steps - before <= tokens + 1
        assert running.metrics.preemptions == 0
    for first, completion in zip(range(6, 10), found, strict=True):
        is_exact(row_of(2, first), completion)


@ours
async def test_a_prompt_in_chunks_keeps_its_claim_to_the_room_that_it_was_let_in_for() -> None:
    """Beside it two others grow; together they need more than the ten blocks, also while it is half computed."""
    small = cache_of(blocks=11).model_copy(update={"prompt_tokens_per_step": 2})
    asked, budgets = [row_of(2), row_of(2, first=5), row_of(5 * BLOCK)], [40, 40, 2]
    async with engine(tokenizer=ENDLESS, worker=small) as running:
        generations = [
            asyncio.ensure_future(running.generate(prompt, GenerationArgs(max_tokens=budget)))
            for prompt, budget in zip(asked, budgets, strict=True)
        ]
        await asyncio.sleep(0)
        await running.swap(0, weights(1))
        found = await asyncio.gather(*generations)
        assert running.metrics.preemptions > 0
    for prompt, completion in zip(asked, found, strict=True):
        is_exact(prompt, completion)


@ours
async def test_who_came_first_ends_first() -> None:
    """The youngest gives its place up, and takes it again before those who have not begun."""
    ended = list[int]()
    async with engine(tokenizer=ENDLESS, worker=cache_of(blocks=11)) as running:
        await running.swap(0, weights(1))

        async def generate(number: int) -> None:
            await running.generate(row_of(8, first=number), GenerationArgs(max_tokens=40))
            ended.append(number)

        await asyncio.gather(*(generate(number) for number in range(4, 12)))
        assert running.metrics.preemptions > 0
    assert ended == sorted(ended)


@pytest.mark.parametrize("kv", ["keep", "recompute"])
@ours
async def test_a_half_computed_prompt_begins_again_with_the_new_weights(kv: str) -> None:
    gate, long = Gate(after=10), row_of(50)
    async with engine(tokenizer=gate, worker=settings(kv_on_swap=kv, prompt_tokens_per_step=3)) as running:
        await running.swap(OLD, weights(1))
        async with asyncio.TaskGroup() as tasks:
            beside = tasks.create_task(running.generate([5], GenerationArgs(max_tokens=40)))
            late = tasks.create_task(running.generate(long, GenerationArgs(max_tokens=8)))
            await gate.reached.wait()
            swapping = tasks.create_task(running.swap(NEW, weights(2)))
            await asyncio.sleep(0)
            gate.open()
            await swapping
    assert beside.result().versions[0].version == OLD
    assert late.result().versions == spans_of([NEW] * 8)
    is_exact(long, late.result(), seed=2)


@ours
async def test_the_next_turn_begins_with_what_was_sampled() -> None:
    row, turns = prompts(1)[0][:5], []
    async with engine(tokenizer=ENDLESS, worker=settings()) as running:
        await running.swap(0, weights(1))
        for expected in (0, 2 * BLOCK, 4 * BLOCK):  # 5 + 16 tokens, of which the last one's keys are not there yet
            before = running.metrics.prefix_tokens_reused
            completion = await running.generate(row, GenerationArgs(max_tokens=16))
            assert running.metrics.prefix_tokens_reused - before == expected
            turns.append((list(row), completion))
            row += completion.token_ids.tolist()
    for prompt, completion in turns:
        is_exact(prompt, completion)


async def test_without_reuse_everything_is_computed() -> None:
    async with engine(tokenizer=ENDLESS, worker=settings(prefix_reuse=False)) as running:
        await running.swap(0, weights(1))
        await sampled(running, [[5] * 20] * 3)
        assert running.metrics.prefix_tokens_reused == 0


@pytest.mark.parametrize("kv", ["keep", "recompute"])
async def test_nobody_begins_with_the_keys_of_other_weights(kv: str) -> None:
    prompt = (prompts(1)[0] * SHAPE.max_positions)[:30]
    gate = Gate(after=8)
    async with engine(tokenizer=gate, worker=settings(kv_on_swap=kv)) as running:
        await running.swap(OLD, weights(1))
        running_over = asyncio.ensure_future(running.generate(prompt, GenerationArgs(max_tokens=30)))
        await gate.reached.wait()
        swapping = asyncio.ensure_future(running.swap(NEW, weights(2)))
        await asyncio.sleep(0)
        gate.open()
        await swapping
        beside = await running.generate(prompt, GenerationArgs(max_tokens=4))
        mixed = await running_over
        after = await running.generate([*prompt, *mixed.token_ids.tolist()], GenerationArgs(max_tokens=1))
    is_exact(prompt, beside, seed=2)
    is_exact([*prompt, *mixed.token_ids.tolist()], after, seed=2)


@pytest.mark.parametrize("chunk", [4, 4096])
async def test_recomputing_gives_the_new_weights_own_keys(chunk: int) -> None:
    """From the swap on every log-probability is what the new weights say of the whole row; with `keep` it would not be."""
    asked = prompts(10, longest=30)
    gate = Gate(after=10)
    async with engine(tokenizer=gate, worker=settings(kv_on_swap="recompute", prompt_tokens_per_step=chunk)) as running:
        await running.swap(OLD, weights(1))
        generations = [asyncio.ensure_future(running.generate(prompt, GenerationArgs(max_tokens=25))) for prompt in asked]
        await gate.reached.wait()
        generations[3].cancel()
        swapping = asyncio.ensure_future(running.swap(NEW, weights(2)))
        await asyncio.sleep(0)
        gate.open()
        await swapping
        found = await asyncio.gather(*generations, return_exceptions=True)
        assert (await at_rest(running)).kv_blocks_used == 0
    assert isinstance(found.pop(3), asyncio.CancelledError)
    asked.pop(3)
    flips = set[int]()
    for prompt, completion in zip(asked, found, strict=True):
        assert isinstance(completion, Completion)
        assert len(completion.token_ids) == 25
        old = sum(span.stop - span.start for span in completion.versions if span.version == OLD)
        flips.add(old)
        assert completion.versions == spans_of([OLD] * old + [NEW] * (25 - old))
        by_old, by_new = (recomputed(weights(seed), prompt, completion) for seed in (1, 2))
        np.testing.assert_allclose(completion.logprobs[:old], by_old[:old], atol=1e-4)
        np.testing.assert_allclose(completion.logprobs[old:], by_new[old:], atol=1e-4)
    assert any(0 < flip < 25 for flip in flips)


@pytest.mark.parametrize(("chunk", "reuse"), [(3, True), (4096, False)])
async def test_preempted_generations_lose_nothing(chunk: int, reuse: bool) -> None:
    """Room for two of sixteen long generations: all that start must be pushed out and taken in again, several times."""
    small = cache_of(blocks=11).model_copy(update={"prompt_tokens_per_step": chunk, "prefix_reuse": reuse})
    asked = [*prompts(8, longest=24), *[prompts(1)[0]] * 8]
    async with engine(tokenizer=ENDLESS, worker=small) as running:
        await running.swap(0, weights(1))
        found = await asyncio.gather(
            *(running.generate(prompt, GenerationArgs(max_tokens=40, seed=number)) for number, prompt in enumerate(asked))
        )
        metrics = await at_rest(running)
        assert metrics.preemptions > 0
        assert (metrics.kv_blocks_used, metrics.waiting_requests) == (0, 0)
    async with engine(tokenizer=ENDLESS, worker=settings()) as roomy:
        await roomy.swap(0, weights(1))
        undisturbed = await asyncio.gather(
            *(roomy.generate(prompt, GenerationArgs(max_tokens=40, seed=number)) for number, prompt in enumerate(asked))
        )
        assert roomy.metrics.preemptions == 0
    for prompt, completion, same in zip(asked, found, undisturbed, strict=True):
        assert completion.token_ids.tolist() == same.token_ids.tolist()
        is_exact(prompt, completion)


async def test_an_automatic_cache_holds_what_may_run_at_once() -> None:
    worker = settings(kv_cache_gb="auto", max_running=3)
    async with engine(tokenizer=ENDLESS, worker=worker) as running:
        await running.swap(0, weights(1))
        asked = prompts(3)
        found = await sampled(running, asked, max_tokens=12)
        metrics = await at_rest(running)
    assert 3 * SHAPE.max_positions // BLOCK - 1 <= metrics.kv_blocks <= 3 * SHAPE.max_positions // BLOCK
    assert metrics.preemptions == 0
    for prompt, completion in zip(asked, found, strict=True):
        is_exact(prompt, completion)
