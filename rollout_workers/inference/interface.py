"""Base of the inference backends: keyword arguments, several samples at once, calls from other threads.

await inference.generate("3=", temperature=0)          one continuation; keywords override `args`, `args` the defaults
await inference.agenerate("3=", n=8)                   eight continuations at once
inference.generate_blocking("3=")                      from code that runs on a thread of its own
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from dataclasses import fields, replace
from difflib import get_close_matches
from typing import TypedDict, Unpack

from async_rl.protocols import GenerationArgs, InferenceInterface, Prompt, Returns, Tokenizer
from async_rl.types import Completion


class GenerationKeywords(TypedDict, total=False):
    """The fields of `GenerationArgs`, one by one."""

    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    stop: tuple[str, ...] | None
    stop_token_ids: tuple[int, ...] | None
    seed: int | None


class Inference(ABC):
    """The base of the backends. One provides `_generate` and sets `returns`."""

    tokenizer: Tokenizer
    returns: Returns = "text"
    """What its completions carry."""
    _loop: asyncio.AbstractEventLoop
    """The loop on which it was opened."""

    @abstractmethod
    async def _generate(self, prompt: Prompt, args: GenerationArgs) -> Completion:
        """Sample one continuation. Unset `args` follow the backend's defaults."""

    async def generate(
        self, prompt: Prompt, args: GenerationArgs | None = None, **keywords: Unpack[GenerationKeywords]
    ) -> Completion:
        """Sample one continuation; see `InferenceInterface`."""
        return await self._generate(prompt, overlay(args, keywords))

    async def agenerate(
        self, prompt: Prompt, args: GenerationArgs | None = None, *, n: int = 1, **keywords: Unpack[GenerationKeywords]
    ) -> tuple[Completion, ...]:
        """Sample `n` continuations of one prompt concurrently. With a seed, the i-th uses seed + i."""
        if n < 1:
            raise ValueError(f"n={n} must be at least 1")
        return tuple(await generate_several(self, prompt, overlay(args, keywords), n))

    def generate_blocking(
        self, prompt: Prompt, args: GenerationArgs | None = None, **keywords: Unpack[GenerationKeywords]
    ) -> Completion:
        """Sample one continuation from another thread (`asyncio.to_thread`). Raises RuntimeError on the loop's own thread."""
        try:
            blocks_loop = asyncio.get_running_loop() is self._loop
        except RuntimeError:  # no loop runs on this thread
            blocks_loop = False
        if blocks_loop:
            raise RuntimeError("generate_blocking would wait for the very loop that it blocks: use `await generate(...)` here")
        return asyncio.run_coroutine_threadsafe(self._generate(prompt, overlay(args, keywords)), self._loop).result()


async def generate_several(inference: InferenceInterface, prompt: Prompt, args: GenerationArgs, n: int) -> list[Completion]:
    """Sample `n` continuations of one prompt concurrently. With a seed, the i-th uses seed + i."""
    seeds = [args.seed + index if args.seed is not None else None for index in range(n)]
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(inference.generate(prompt, replace(args, seed=seed))) for seed in seeds]
    except ExceptionGroup as several:
        raise several.exceptions[0] from None  # all fail for the same reason; callers catch ContextOverflow
    return [each.result() for each in running]


def returns_of(inference: object) -> Returns:
    """What the completions of a backend carry; text for one that does not say."""
    returns = getattr(inference, "returns", "text")
    return returns if returns in ("tokens", "logprobs") else "text"


def overlay(args: GenerationArgs | None, keywords: GenerationKeywords) -> GenerationArgs:
    """Merge keywords over `args`. Raises TypeError naming an unknown keyword."""
    known = [field.name for field in fields(GenerationArgs)]
    for name in keywords:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
            raise TypeError(f"there is no generation argument {name!r}; {hint}")
    given = GenerationArgs(**keywords)
    return given.over(args) if args is not None else given
