"""Everything at once, at random: prefixes, chunks, a tiny cache, cancellations and swaps never show in what is sampled."""

import asyncio
import random
import secrets
from dataclasses import dataclass

import numpy as np
import pytest

from async_rl.protocols import GenerationArgs
from async_rl.types import Completion
from tests.support.engine_stage import ENDLESS, SCHEDULES_ASYNC, SHAPE, cache_of, engine, recomputed, weights

REQUESTS = 40
SWAPS = 3


@dataclass(frozen=True, kw_only=True)
class Request:
    prompt: list[int]
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int | None

    @property
    def args(self) -> GenerationArgs:
        return GenerationArgs(
            max_tokens=self.max_tokens, temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, seed=self.seed
        )


@pytest.mark.parametrize("is_async", [False, pytest.param(True, marks=SCHEDULES_ASYNC)], ids=["", "async"])
@pytest.mark.parametrize(("kv", "cuda_graphs"), [("keep", "always"), ("recompute", "always"), ("keep", "never")])
async def test_every_token_is_what_its_weights_say(kv: str, cuda_graphs: str, is_async: bool) -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    changes = {
        "kv_on_swap": kv,
        "prompt_tokens_per_step": chance.choice([2, 7, 30, 4096]),
        "async_scheduling": is_async,
        "cuda_graphs": cuda_graphs,
    }
    asked = list[Request]()
    tasks = list[asyncio.Task[Completion]]()
    async with engine(tokenizer=ENDLESS, worker=cache_of(blocks=chance.randint(11, 30)).model_copy(update=changes)) as running:
        await running.swap(0, weights(0))
        for number in range(REQUESTS):
            asked.append(request(chance, asked, tasks))
            tasks.append(asyncio.create_task(running.generate(asked[-1].prompt, asked[-1].args)))
            if number % (REQUESTS // SWAPS) == REQUESTS // SWAPS - 1:
                await running.swap(running.version + 1, weights(running.version + 1))
            if chance.random() < 0.15:
                chance.choice(tasks).cancel()
            for _ in range(chance.randint(0, 3)):
                await running.generate([5], GenerationArgs(max_tokens=1))  # time goes by
        found = await asyncio.gather(*tasks, return_exceptions=True)
        await running.swap(running.version + 1, weights(0))
        assert (running.metrics.kv_blocks_used, running.metrics.active_requests) == (0, 0)
    for each, completion in zip(asked, found, strict=True):
        if isinstance(completion, Completion):
            assert len(completion.token_ids) == each.max_tokens
            check(each.prompt, (each.temperature, each.top_k, each.top_p), completion, kv)
        else:
            assert isinstance(completion, asyncio.CancelledError)


def request(chance: random.Random, asked: list[Request], tasks: list[asyncio.Task[Completion]]) -> Request:
    """Often the beginning of another one's row, what was sampled included."""
    prompt = [chance.randrange(4, SHAPE.vocab_size) for _ in range(chance.randint(1, 30))]
    if asked and chance.random() < 0.6:
        before, task = chance.choice(list(zip(asked, tasks, strict=True)))
        ended = task.done() and not task.cancelled()
        row = [*before.prompt, *(task.result().token_ids.tolist() if ended else ())]
        prompt = [*row[: chance.randint(1, len(row))], *prompt[:6]][:50]
    return Request(
        prompt=prompt,
        max_tokens=chance.randint(1, min(40, SHAPE.max_positions - len(prompt))),
        temperature=chance.choice([1.0, 0.7]),
        top_k=chance.choice([0, 0, 5]),
        top_p=chance.choice([1.0, 1.0, 0.8]),
        seed=chance.choice([None, 3]),
    )


def check(prompt: list[int], shape: tuple[float, int, float], completion: Completion, kv: str) -> None:
    spans = completion.versions
    assert [span.start for span in spans] == [0, *(span.stop for span in spans[:-1])]
    assert spans[-1].stop == len(completion.token_ids)
    assert [span.version for span in spans] == sorted({span.version for span in spans})
    # With `keep`, tokens after a swap were sampled with keys of the weights before it: no full pass says the same.
    exact = spans if kv == "recompute" else spans[:1]
    for span in exact:
        want = recomputed(weights(span.version), prompt, completion, *shape)
        own = slice(span.start, span.stop)
        np.testing.assert_allclose(completion.logprobs[own], want[own], atol=1e-4)
