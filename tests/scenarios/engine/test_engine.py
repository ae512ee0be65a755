"""Our engines from outside: what they sample is what they say they sampled, whatever happens meanwhile."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from async_rl.config.rollout import WorkerConfig
from async_rl.errors import ConfigError, ServiceStopped
from async_rl.protocols import ContextOverflow, GenerationArgs
from async_rl.tokenization.tokenizers import Characters
from async_rl.types import Message, StopReason, VersionSpan
from rollout_workers.inference.stepped_engine import SteppedEngine
from tests.support.engine_stage import (
    ALPHABET,
    ENDLESS,
    SHAPE,
    TOKENIZER,
    Gate,
    cache_of,
    engine_of,
    logits_of,
    next_logits,
    prompts,
    recomputed,
    weights,
)

MakeEngine = Callable[..., SteppedEngine]


@pytest.fixture(params=["megatron", "hf"])
def engine(request: pytest.FixtureRequest) -> MakeEngine:
    return partial(engine_of, request.param)


@pytest.fixture
async def ready(engine: MakeEngine) -> AsyncIterator[SteppedEngine]:
    async with engine() as running:
        await running.swap(0, weights(1))
        yield running


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_logprobs_are_those_of_a_full_forward_pass(engine: MakeEngine, temperature: float) -> None:
    asked = prompts(40)
    budgets = [1 + position % 30 for position in range(len(asked))]
    async with engine() as running:
        await running.swap(0, weights(1))
        found = await asyncio.gather(
            *(
                running.generate(prompt, GenerationArgs(max_tokens=budget, temperature=temperature))
                for prompt, budget in zip(asked, budgets, strict=True)
            )
        )
    for prompt, budget, completion in zip(asked, budgets, found, strict=True):
        want = recomputed(weights(1), prompt, completion, temperature)
        assert completion.logprobs.dtype == np.float32
        np.testing.assert_allclose(completion.logprobs, want, atol=1e-4)
        assert completion.versions == (VersionSpan(version=0, start=0, stop=len(completion.token_ids)),)
        ended = completion.token_ids[-1] == TOKENIZER.end_id
        assert completion.stop_reason is (StopReason.END if ended else StopReason.LENGTH)
        assert ended or len(completion.token_ids) == budget
        assert TOKENIZER.end_id not in completion.token_ids[:-1]
    assert {completion.stop_reason for completion in found} == {StopReason.END, StopReason.LENGTH}


async def test_an_engine_samples_on_when_another_of_its_process_ends(ready: SteppedEngine, engine: MakeEngine) -> None:
    async with engine():
        pass
    asked = prompts(6)
    found = await asyncio.gather(*(ready.generate(prompt, GenerationArgs(max_tokens=4)) for prompt in asked))
    for prompt, completion in zip(asked, found, strict=True):
        np.testing.assert_allclose(completion.logprobs, recomputed(weights(1), prompt, completion), atol=1e-4)


async def test_a_packed_row_is_computed_alike_while_an_engine_of_its_process_lives(engine: MakeEngine) -> None:
    row = prompts(1)[0]
    alone = logits_of(weights(1), row)
    async with engine():
        assert torch.equal(logits_of(weights(1), row), alone)


async def test_late_requests_join_a_running_batch(engine: MakeEngine) -> None:
    asked = prompts(12)
    async with engine() as running:
        await running.swap(0, weights(1))
        async with asyncio.TaskGroup() as tasks:
            first = tasks.create_task(running.generate(asked[0], GenerationArgs(max_tokens=30)))
            found = []
            for prompt in asked[1:]:
                found.append(await running.generate(prompt, GenerationArgs(max_tokens=3)))
        found.insert(0, first.result())
    for prompt, completion in zip(asked, found, strict=True):
        np.testing.assert_allclose(completion.logprobs, recomputed(weights(1), prompt, completion, 1.0), atol=1e-4)


async def test_greedy_takes_the_likeliest_token_and_is_certain_of_it(engine: MakeEngine) -> None:
    prompt, greedy = prompts(1)[0], GenerationArgs(temperature=0.0, max_tokens=6)
    async with engine() as running:
        await running.swap(0, weights(1))
        completion = await running.generate(prompt, greedy)
        mixed, _ = await asyncio.gather(running.generate(prompt, greedy), running.generate(prompt))
    assert completion.token_ids.tolist() == mixed.token_ids.tolist()
    assert completion.logprobs.tolist() == [0.0] * len(completion.token_ids)
    row = list(prompt)
    for token in completion.token_ids.tolist():
        assert token == int(next_logits(weights(1), row).argmax())
        row.append(token)


async def test_tokens_are_drawn_from_the_distribution(engine: MakeEngine) -> None:
    """The first token of many generations, counted: a wrong temperature or a biased draw would show."""
    prompt, temperature, count = prompts(1)[0], 0.7, 2000
    async with engine() as running:
        await running.swap(0, weights(1))
        args = GenerationArgs(max_tokens=1, temperature=temperature)
        found = await asyncio.gather(*(running.generate(prompt, args) for _ in range(count)))
    counted = np.bincount([completion.token_ids[0] for completion in found], minlength=SHAPE.vocab_size)
    expected = count * (next_logits(weights(1), prompt) / temperature).softmax(-1).numpy()
    often = expected >= 5
    chi_squared = (((counted - expected) ** 2) / expected)[often].sum()
    degrees = int(often.sum())
    assert chi_squared < degrees + 5 * np.sqrt(2 * degrees)


async def test_a_seed_fixes_the_continuation_whoever_shares_the_batch(ready: SteppedEngine) -> None:
    prompt, args = prompts(1)[0], GenerationArgs(seed=5)
    alone = await ready.generate(prompt, args)
    among, *_ = await asyncio.gather(ready.generate(prompt, args), *(ready.generate(other) for other in prompts(9)))
    other = await ready.generate(prompt, GenerationArgs(seed=6))
    assert alone.token_ids.tolist() == among.token_ids.tolist()
    assert alone.token_ids.tolist() != other.token_ids.tolist()


async def test_weights_flip_under_running_generations(engine: MakeEngine) -> None:
    """Each token carries the version that sampled it, and until the flip it is exactly what that version says."""
    asked = prompts(20, longest=12)
    old, new = weights(1), weights(2)
    gate = Gate(after=6)
    async with engine(tokenizer=gate) as running:
        await running.swap(3, old)
        async with asyncio.TaskGroup() as tasks:
            generations = [tasks.create_task(running.generate(prompt, GenerationArgs(max_tokens=50))) for prompt in asked]
            await gate.reached.wait()
            swapping = tasks.create_task(running.swap(5, new))
            await asyncio.sleep(0)
            assert running.version == 3
            gate.open()
            await swapping
            assert running.version == 5
        late = await running.generate(asked[0], GenerationArgs(max_tokens=4))
        assert running.metrics.active_requests == 0
    assert max(task.result().versions[0].stop for task in generations) == 6
    for prompt, task in zip(asked, generations, strict=True):
        completion = task.result()
        flip = completion.versions[0].stop
        assert 1 <= flip <= 6  # the gate stood in the sixth step; some generations may have missed the first
        assert completion.versions == (VersionSpan(version=3, start=0, stop=flip), VersionSpan(version=5, start=flip, stop=50))
        under_old = recomputed(old, prompt, completion, 1.0)
        np.testing.assert_allclose(completion.logprobs[:flip], under_old[:flip], atol=1e-4)
        # The first token after the flip was sampled by other weights: under the old ones it would look different.
        assert abs(completion.logprobs[flip] - under_old[flip]) > 1e-3
    assert late.versions == (VersionSpan(version=5, start=0, stop=4),)
    np.testing.assert_allclose(late.logprobs, recomputed(new, asked[0], late, 1.0), atol=1e-4)


async def test_weights_that_do_not_fit_change_nothing(ready: SteppedEngine) -> None:
    good = dict(weights(2))
    for broken in (
        {name: tensor for name, tensor in good.items() if "linear_fc1" not in name},
        good | {"decoder.final_layernorm.weight": torch.ones(3)},
        good | {"decoder.layers.7.mlp.linear_fc2.weight": torch.ones(3)},
    ):
        with pytest.raises(ValueError, match="do not fit the model"):
            await ready.swap(1, broken)
    with pytest.raises(ValueError, match="versions only grow"):
        await ready.swap(0, good)
    assert ready.version == 0
    assert (await ready.generate("abc", GenerationArgs(max_tokens=2))).versions[0].version == 0


async def test_generation_waits_for_the_first_weights(engine: MakeEngine) -> None:
    async with engine() as running:
        assert running.version == -1
        async with asyncio.TaskGroup() as tasks:
            early = tasks.create_task(running.generate("hello", GenerationArgs(max_tokens=2)))
            gone = tasks.create_task(running.generate("never", GenerationArgs(max_tokens=2)))
            await asyncio.sleep(0)
            with pytest.raises(ValueError, match="do not fit"):
                await running.swap(0, {})
            assert (running.metrics.active_requests, running.metrics.steps) == (2, 0)
            gone.cancel()
            await asyncio.wait([gone])
            await running.swap(0, weights(1))
            assert (await early).versions[0].version == 0
        assert gone.cancelled()
        assert running.metrics.active_requests == 0


async def test_stop_strings_end_the_text_and_keep_the_tokens(engine: MakeEngine) -> None:
    asked = prompts(8)
    async with engine(tokenizer=ENDLESS) as running:
        await running.swap(0, weights(1))
        found = await asyncio.gather(
            *(running.generate(prompt, GenerationArgs(max_tokens=30, stop=("a", "7"), seed=3)) for prompt in asked)
        )
        unstopped = await asyncio.gather(*(running.generate(prompt, GenerationArgs(max_tokens=30, seed=3)) for prompt in asked))
    assert any(completion.stop_reason is StopReason.STOP for completion in found)
    for completion, longer in zip(found, unstopped, strict=True):
        shorter = len(completion.token_ids)
        assert completion.token_ids.tolist() == longer.token_ids[:shorter].tolist()
        assert completion.text == TOKENIZER.decode(completion.token_ids.tolist())
        stops = [position for position, letter in enumerate(longer.text) if letter in "a7"]
        if stops:
            assert completion.stop_reason is StopReason.STOP
            assert completion.text == longer.text[: stops[0] + 1]
        else:
            assert completion.stop_reason is StopReason.LENGTH


async def test_cancelled_generations_give_their_place_back(engine: MakeEngine) -> None:
    """The cache holds one long sequence: five of six wait for room when all are cancelled."""
    gate = Gate(after=3)
    async with engine(worker=cache_of(blocks=11), tokenizer=gate) as running:
        await running.swap(0, weights(1))
        long = GenerationArgs(max_tokens=39)
        hogs = [asyncio.ensure_future(running.generate("abcdefgh" * 3, long)) for _ in range(6)]
        await gate.reached.wait()
        for hog in hogs:
            hog.cancel()
        await asyncio.wait(hogs)
        gate.open()
        small = await running.generate("xyz", GenerationArgs(max_tokens=5))
        assert len(small.token_ids) == 5
        assert all(hog.cancelled() for hog in hogs)
        assert running.metrics.active_requests == 0
        before = running.metrics
        await running.generate("xyz", GenerationArgs(max_tokens=1))
        assert running.metrics.tokens_generated == before.tokens_generated + 1
        assert running.metrics.steps == before.steps + 1


async def test_a_step_that_was_queued_for_a_cancelled_generation_is_left_out(engine: MakeEngine) -> None:
    gate = Gate(after=1)
    async with engine(tokenizer=gate) as running:
        await running.swap(0, weights(1))
        only = asyncio.ensure_future(running.generate("abc", GenerationArgs(max_tokens=1)))
        await gate.reached.wait()  # what comes now is done after this step, with which the generation ends
        gone = asyncio.ensure_future(running.generate("xyz"))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.wait([gone])
        gate.open()
        await only
        await running.swap(1, weights(2))  # behind all that is queued
        assert running.metrics.steps == 1
        assert len((await running.generate("xyz", GenerationArgs(max_tokens=2))).token_ids) == 2


async def test_more_requests_than_cache_are_queued_paused_and_finished_exactly(engine: MakeEngine) -> None:
    """Room for about two sequences: requests wait, are pushed out in the middle and taken in again."""
    asked = prompts(24)
    async with engine(worker=cache_of(blocks=18), tokenizer=ENDLESS) as running:
        await running.swap(0, weights(1))
        found = await asyncio.gather(*(running.generate(prompt, GenerationArgs(max_tokens=30)) for prompt in asked))
    for prompt, completion in zip(asked, found, strict=True):
        assert len(completion.token_ids) == 30
        np.testing.assert_allclose(completion.logprobs, recomputed(weights(1), prompt, completion, 1.0), atol=1e-4)


async def test_no_more_generations_run_at_once_than_the_settings_allow(engine: MakeEngine) -> None:
    settings = WorkerConfig(kv_cache_gb=0.01, kv_block_tokens=8, max_running=2)
    async with engine(tokenizer=ENDLESS, worker=settings) as running:
        await running.swap(0, weights(1))
        found = await asyncio.gather(*(running.generate(prompt, GenerationArgs(max_tokens=6)) for prompt in prompts(5)))
        metrics = running.metrics
    assert [len(completion.token_ids) for completion in found] == [6] * 5
    assert metrics.steps >= metrics.tokens_generated / 2


@pytest.mark.parametrize("length", [1, SHAPE.max_positions - 1])
async def test_the_context_is_filled_to_the_last_position(engine: MakeEngine, length: int) -> None:
    row = (prompts(1)[0] * SHAPE.max_positions)[:length]
    async with engine(tokenizer=ENDLESS) as running:
        await running.swap(0, weights(1))
        completion = await running.generate(row, GenerationArgs(max_tokens=10_000))
    assert len(completion.token_ids) == SHAPE.max_positions - length
    assert completion.stop_reason is StopReason.LENGTH
    np.testing.assert_allclose(completion.logprobs, recomputed(weights(1), row, completion, 1.0), atol=1e-4)


async def test_prompts_come_as_text_messages_or_token_ids(ready: SteppedEngine) -> None:
    args = GenerationArgs(seed=1, max_tokens=4)
    by_ids = await ready.generate(TOKENIZER.render("abc"), args)
    by_text = await ready.generate("abc", args)
    assert by_ids.token_ids.tolist() == by_text.token_ids.tolist()
    assert (await ready.generate([Message(role="user", content="abc")], args)).token_ids.size > 0


@pytest.mark.parametrize(
    ("prompt", "args", "sentence"),
    [
        ([5] * 64, GenerationArgs(), "the prompt has 64 tokens, and a sequence has at most 64"),
        ([], GenerationArgs(), "the prompt is empty"),
        ([5], GenerationArgs(top_p=0.0), "top_p=0 must be above 0"),
        ([5], GenerationArgs(top_p=1.5), "top_p=1.5 must be above 0 and at most 1"),
        ([5], GenerationArgs(top_k=-1), "top_k=-1 must be 0"),
        ([5], GenerationArgs(seed=-1), "seed=-1 must be at least 0"),
        ([5], GenerationArgs(seed=2**70), "must be at least 0 and fit into 63 bits"),
        ([5], GenerationArgs(temperature=-1.0), "temperature=-1 must be"),
        ([5], GenerationArgs(max_tokens=0), "max_tokens=0 must be"),
        ([5, 4000], GenerationArgs(), "token id 4000 is outside"),
    ],
)
async def test_what_cannot_be_generated_is_refused_by_name(
    ready: SteppedEngine, prompt: list[int], args: GenerationArgs, sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        await ready.generate(prompt, args)


async def test_a_cache_too_small_for_one_sequence_is_refused(engine: MakeEngine) -> None:
    with pytest.raises(ConfigError, match=r"worker\.kv_cache_gb.*one sequence of 64 tokens.*or lower model\.max_sequence"):
        async with engine(worker=WorkerConfig(kv_cache_gb=1e-5, kv_block_tokens=8)):
            pass


async def test_a_model_with_many_positions_needs_a_cache_for_the_longest_sequence_only(engine: MakeEngine) -> None:
    many = replace(SHAPE, max_positions=1 << 20)
    with pytest.raises(ConfigError, match="one sequence of 1048576 tokens"):
        async with engine(shape=many):
            pass
    async with engine(shape=replace(many, max_sequence=64), tokenizer=ENDLESS) as running:
        await running.swap(0, weights(1))
        completion = await running.generate([5] * 60, GenerationArgs(max_tokens=10_000))
        assert (len(completion.token_ids), completion.stop_reason) == (4, StopReason.LENGTH)
        with pytest.raises(ContextOverflow, match=r"has 64 tokens, and a sequence has at most 64 \(model\.max_sequence\)"):
            await running.generate([5] * 64)


async def test_closing_ends_everybody_who_waits(engine: MakeEngine) -> None:
    async with engine() as running:
        watched = asyncio.ensure_future(running.watch())
        waiting = asyncio.ensure_future(running.generate("abc"))
        await asyncio.sleep(0)
    with pytest.raises(ServiceStopped, match="closed"):
        await waiting
    await watched
    with pytest.raises(ServiceStopped, match="closed"):
        await running.generate("abc")


class Broken(Characters):
    def decode(self, token_ids: Sequence[int]) -> str:
        raise RuntimeError("no text today")


async def test_what_breaks_the_thread_reaches_everybody(engine: MakeEngine) -> None:
    async def body() -> None:
        async with engine(tokenizer=Broken(ALPHABET)) as running:
            await running.swap(0, weights(1))
            watched = asyncio.ensure_future(running.watch())
            waiting = [asyncio.ensure_future(running.generate([5, 6])) for _ in range(3)]
            for one in waiting:
                with pytest.raises(ServiceStopped, match="no text today"):
                    await one
            with pytest.raises(RuntimeError, match="no text today"):
                await watched

    with pytest.raises(ServiceStopped, match="no text today"):
        await body()
