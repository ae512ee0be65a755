"""Inference without a model: scripted answers, which may contain tool calls."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence

from async_rl.protocols import GenerationArgs, Prompt, Returns, Tokenizer
from async_rl.testing import AnswerFunction, ScriptedInference
from async_rl.types import Completion, Message
from rollout_workers.chat.tool_calls import ToolCallFormat, write
from rollout_workers.inference.interface import Inference


class Scripted(Inference):
    """`answers` is a list, used in turn and repeated, or a function of the text so far."""

    returns: Returns = "logprobs"

    def __init__(
        self,
        answers: Sequence[str | Message] | AnswerFunction,
        *,
        tokenizer: Tokenizer | None = None,
        tool_format: ToolCallFormat = "hermes",
        context_tokens: int = 4096,
    ) -> None:
        answer = answers if callable(answers) else in_turn(answers, tool_format)
        self._scripted = ScriptedInference(answer, tokenizer=tokenizer, context_tokens=context_tokens)
        self.tokenizer = self._scripted.tokenizer
        self._loop = asyncio.get_running_loop()

    async def _generate(self, prompt: Prompt, args: GenerationArgs) -> Completion:
        return await self._scripted.generate(prompt, args)


def in_turn(answers: Sequence[str | Message], tool_format: ToolCallFormat) -> Callable[[str], str]:
    if not answers:
        raise ValueError("a script needs at least one answer")
    written = itertools.cycle([_text(answer, tool_format) for answer in answers])
    return lambda _: next(written)


def _text(answer: str | Message, tool_format: ToolCallFormat) -> str:
    if isinstance(answer, str):
        return answer
    return answer.content + write(answer.tool_calls, tool_format)
