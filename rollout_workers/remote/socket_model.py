"""The inference of an environment on a server: the model is asked through the episode's socket."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Any

from async_rl.protocols import ContextOverflow, GenerationArgs, Prompt, Returns, Tokenizer
from async_rl.types import Completion
from rollout_workers.inference.interface import Inference
from rollout_workers.remote.wire import COMPLETION, WireMap, read, write_prompt

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
        question = {"number": number, "model": model, "prompt": write_prompt(prompt), "args": args}
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
            asked.set_result(read(COMPLETION, said))
        except ValueError as error:
            asked.set_exception(error)

    def refuse(self, number: int, kind: str, message: str) -> None:
        asked = self._open.get(number)
        if asked is not None and not asked.done():
            asked.set_exception(ContextOverflow(message) if kind == ContextOverflow.__name__ else GenerationFailed(message))


class SocketInference(Inference):
    """Generates with the worker's model `model`: the empty name is the trained one."""

    def __init__(self, pending: PendingGenerations, model: str, tokenizer: Tokenizer, returns: Returns) -> None:
        self._pending = pending
        self._model = model
        self._loop = asyncio.get_running_loop()
        self.tokenizer = tokenizer
        self.returns: Returns = returns

    async def _generate(self, prompt: Prompt, args: GenerationArgs) -> Completion:
        return await self._pending.ask(self._model, prompt, args)
