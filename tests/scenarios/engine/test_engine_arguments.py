"""Whatever a request asks for shapes the distribution that it is sampled from, and nobody else's."""

import asyncio

import numpy as np
import pytest
import torch

from async_rl.protocols import GenerationArgs
from async_rl.types import StopReason
from tests.support.engine_stage import ENDLESS, SHAPE, engine, next_logits, prompts, recomputed, weights


async def test_the_learner_reproduces_every_distribution_of_a_mixed_batch() -> None:
    shapes = [
        (temperature, top_k, top_p) for temperature in (1.0, 0.6, 1.7) for top_k in (0, 1, 5, 500) for top_p in (1.0, 0.9, 0.3)
    ]
    asked = prompts(len(shapes))
    async with engine(tokenizer=ENDLESS) as running:
        await running.swap(0, weights(1))
        found = await asyncio.gather(
            *(
                running.generate(prompt, GenerationArgs(temperature=temperature, top_k=top_k, top_p=top_p))
                for prompt, (temperature, top_k, top_p) in zip(asked, shapes, strict=True)
            )
        )
    for prompt, (temperature, top_k, top_p), completion in zip(asked, shapes, found, strict=True):
        want = recomputed(weights(1), prompt, completion, temperature, top_k, top_p)
        np.testing.assert_allclose(completion.logprobs, want, atol=1e-4)
        if top_k == 1:
            assert completion.logprobs.tolist() == [0.0] * len(completion.token_ids)


@pytest.mark.parametrize(
    "args", [GenerationArgs(top_k=4), GenerationArgs(top_p=0.6), GenerationArgs(top_k=6, top_p=0.7)], ids=str
)
async def test_what_is_cut_is_never_sampled_and_the_rest_as_often_as_it_should(args: GenerationArgs) -> None:
    prompt, count = prompts(1)[0], 1000
    async with engine() as running:
        await running.swap(0, weights(1))
        one = GenerationArgs(max_tokens=1).over(args)
        found = await asyncio.gather(*(running.generate(prompt, one) for _ in range(count)))
    probability = next_logits(weights(1), prompt).softmax(-1)
    expected = torch.from_numpy(_by_hand(probability.numpy(), args)).double() * count
    counted = torch.bincount(torch.tensor([completion.token_ids[0] for completion in found]), minlength=SHAPE.vocab_size)
    assert counted[expected == 0].sum() == 0
    often = expected >= 5
    chi_squared = float((((counted - expected) ** 2) / expected)[often].sum())
    degrees = int(often.sum())
    assert chi_squared < degrees + 5 * np.sqrt(2 * degrees)


def _by_hand(probability: np.ndarray, args: GenerationArgs) -> np.ndarray:
    """One token after the other, from the likeliest on."""
    order = np.argsort(-probability)
    left = order[: args.top_k] if args.top_k else order
    total, kept, goal = probability[left].sum(), [], args.top_p if args.top_p is not None else 1.0
    for token in left:
        if kept and probability[kept].sum() / total >= goal:
            break
        kept.append(token)
    cut = np.zeros_like(probability)
    cut[kept] = probability[kept] / probability[kept].sum()
    return cut


async def test_stop_tokens_end_a_generation_and_stay_in_it() -> None:
    asked = prompts(8)
    stops = (7, 21)
    async with engine(tokenizer=ENDLESS) as running:
        await running.swap(0, weights(1))
        args = GenerationArgs(max_tokens=30, seed=3)
        whole = await asyncio.gather(*(running.generate(prompt, args) for prompt in asked))
        found = await asyncio.gather(
            *(running.generate(prompt, GenerationArgs(stop_token_ids=stops).over(args)) for prompt in asked)
        )
    assert {completion.stop_reason for completion in found} == {StopReason.STOP, StopReason.LENGTH}
    for completion, longer in zip(found, whole, strict=True):
        row = longer.token_ids.tolist()
        first = min((row.index(token) for token in stops if token in row), default=len(row) - 1)
        assert completion.token_ids.tolist() == row[: first + 1]
        assert (completion.stop_reason is StopReason.STOP) == (row[first] in stops)
        assert len(completion.logprobs) == first + 1


async def test_a_temperature_close_to_nothing_is_greedy() -> None:
    async with engine() as running:
        await running.swap(0, weights(1))
        cold, greedy = await asyncio.gather(
            *(running.generate([5, 6], GenerationArgs(temperature=temperature)) for temperature in (1e-42, 0.0))
        )
    assert cold.token_ids.tolist() == greedy.token_ids.tolist()
    assert np.isfinite(cold.logprobs).all()


async def test_seeds_hold_among_others_who_use_seeds_too() -> None:
    prompt = prompts(1)[0]
    async with engine(tokenizer=ENDLESS) as running:
        await running.swap(0, weights(1))
        alone = [await running.generate(prompt, GenerationArgs(seed=seed, top_p=0.95)) for seed in range(4)]
        together = await asyncio.gather(
            *(running.generate(prompt, GenerationArgs(seed=seed, top_p=0.95)) for seed in range(4)),
            *(running.generate(other, GenerationArgs(seed=1, max_tokens=40)) for other in prompts(5)),
        )
    for one, same in zip(alone, together, strict=False):
        assert one.token_ids.tolist() == same.token_ids.tolist()
    assert len({one.token_ids.tobytes() for one in alone}) == len(alone)
