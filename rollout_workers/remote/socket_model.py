"""The inference of an environment on a server: the model is asked through the episode's socket."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import cache
from itertools import count
from typing import Any

from async_rl.protocols import (
    ContextOverflow,
    GenerationArgs,
    Prompt,
    ReturnsLogprobs,
    ReturnsText,
    ReturnsTokens,
    Tokenizer,
)
from async_rl.types import Completion
from rollout_workers.inference.interface import Inference
from rollout_workers.remote.wire import WireMap, read_completion, write_args, write_prompt

MARKS: dict[str, type] = {"logprobs": ReturnsLogprobs, "tokens": ReturnsTokens, "text": ReturnsText}
"""What completions carry, the most first."""

Send = Callable[[WireMap], Awaitable[None]]


class GenerationFailed(Exception):
    """A generation failed in the worker; the message says why."""


class PendingGenerations:
    """The unanswered generations of one episode."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._numbers = count()
        self._open: dict[int, asyncio.Future[Completion]] = {}

    async def ask(self, model: str, prompt: Prompt, args: GenerationArgs) -> Completion:
        number = next(self._numbers)
        answer = self._open[number] = asyncio.get_running_loop().create_future()
        question = {"number": number, "model": model, "prompt": write_prompt(prompt), "args": write_args(args)}
        try:
            await self._send({"generate": question})
            return await answer
        except asyncio.CancelledError:
            await self._send({"cancel": number})  # frees its place in the engine at once
            raise
        finally:
            del self._open[number]

    def answer(self, number: int, said: Any) -> None:
        """Resolve a generation. An invalid answer is raised in its caller."""
        asked = self._open.get(number)
        if asked is None or asked.done():
            return
        try:
            asked.set_result(read_completion(said))
        except ValueError as error:
            asked.set_exception(error)

    def refuse(self, number: int, kind: str, message: str) -> None:
        asked = self._open.get(number)
        if asked is not None and not asked.done():
            asked.set_exception(ContextOverflow(message) if kind == ContextOverflow.__name__ else GenerationFailed(message))


class SocketInference(Inference):
    def __init__(self, questions: PendingGenerations, model: str, tokenizer: Tokenizer) -> None:
        self._questions = questions
        self._model = model
        self._loop = asyncio.get_running_loop()
        self.tokenizer = tokenizer

    async def _generate(self, prompt: Prompt, args: GenerationArgs) -> Completion:
        return await self._questions.ask(self._model, prompt, args)


def returns_of(inference: object) -> str:
    """The name of what its completions carry; empty for a backend that does not say."""
    return next((name for name, mark in MARKS.items() if isinstance(inference, mark)), "")


@cache
def socket_model(mark: str) -> type[SocketInference]:
    """It says of itself what the worker's model says: agents ask whether it returns tokens."""
    return type(f"SocketInference{mark}", (SocketInference, MARKS[mark]), {}) if mark in MARKS else SocketInference
