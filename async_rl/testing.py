"""Fakes for tests of agents and environments: no model, no network."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import numpy as np

from async_rl.imports.old_names import old_names
from async_rl.protocols import ContextOverflow, EpisodeContext, GenerationArgs, InferenceInterface, Prompt, Returns, Tokenizer
from async_rl.tokenization.rendering import prompt_ids
from async_rl.tokenization.tokenizers import Characters
from async_rl.types import Completion, Rollout, Sample, Status, StopReason, Task, VersionSpan, spans_of

DIGITS_AND_LETTERS = "0123456789=+-*/()abcdefghijklmnopqrstuvwxyz"


AnswerFunction = Callable[[str], str | Awaitable[str]]
"""Maps the text of a row to its continuation; async if the test controls when the generation ends."""


class ScriptedInference:
    """Inference without a model: `answer` writes the text; stop reasons, limits and versions are as an engine returns them."""

    returns: Returns = "logprobs"

    def __init__(
        self,
        answer: AnswerFunction,
        *,
        tokenizer: Tokenizer | None = None,
        version: int = 0,
        logprob: float = -0.5,
        context_tokens: int = 512,
    ) -> None:
        self.tokenizer: Tokenizer = tokenizer if tokenizer is not None else Characters(DIGITS_AND_LETTERS)
        self.version = version
        """Version of tokens sampled from now on; change it to simulate new weights."""
        self.prompts: list[list[int]] = []
        """All prompts so far, as token ids."""
        self._answer = answer
        self._logprob = logprob
        self._context_tokens = context_tokens

    async def generate(self, prompt: Prompt, args: GenerationArgs | None = None) -> Completion:
        token_ids = prompt_ids(prompt, self.tokenizer)
        self.prompts.append(token_ids)
        room = self._context_tokens - len(token_ids)
        if room <= 0:
            raise ContextOverflow(f"a prompt of {len(token_ids)} tokens leaves no room in {self._context_tokens}")
        await asyncio.sleep(0)
        text = self._answer(self.tokenizer.decode(token_ids))
        if inspect.isawaitable(text):
            text = await text
        asked = args if args is not None else GenerationArgs()
        limit = min(room, asked.max_tokens) if asked.max_tokens is not None else room
        return self._completion(text, limit, asked.stop if asked.stop is not None else ())

    def _completion(self, text: str, limit: int, stop: Sequence[str]) -> Completion:
        ends = [text.find(mark) + len(mark) for mark in stop if mark in text]
        if ends:
            ids, reason = self.tokenizer.encode(text[: min(ends)]), StopReason.STOP
        else:
            ids, reason = [*self.tokenizer.encode(text), self.tokenizer.end_id], StopReason.END
        if len(ids) > limit:
            ids, reason = ids[:limit], StopReason.LENGTH
        return Completion(
            token_ids=np.array(ids, np.int32),
            logprobs=np.full(len(ids), self._logprob, np.float32),
            versions=spans_of([self.version] * len(ids)),
            stop_reason=reason,
            text=self.tokenizer.decode(ids),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EchoAgent:
    """A minimal agent: the reward is the share of the prompt's characters that the answer repeats."""

    name: str = "echo"
    seed: int = 0

    def task(self, index: int) -> Task:
        return Task(key=f"{self.name}/{index}", environment=self.name, prompt=str(index), answer=str(index))

    async def rollout(self, task: Task, inference: InferenceInterface, context: EpisodeContext) -> Rollout:
        prompt = inference.tokenizer.render(task.prompt)
        completion = await inference.generate(prompt)
        same = sum(said == wanted for said, wanted in zip(completion.text, task.answer, strict=False))
        return Rollout(samples=(one_turn_row(prompt, completion),), reward=same / len(task.answer), status=Status.OK)


def one_turn_row(prompt: Sequence[int], completion: Completion) -> Sample:
    """The token row of an episode with a single generation."""
    given, sampled = len(prompt), len(completion.token_ids)
    return Sample(
        token_ids=np.concatenate([np.array(prompt, np.int32), completion.token_ids]),
        loss_mask=np.array([0] * given + [1] * sampled, np.uint8),
        logprobs=np.concatenate([np.zeros(given, np.float32), completion.logprobs]),
        versions=tuple(
            VersionSpan(version=span.version, start=given + span.start, stop=given + span.stop) for span in completion.versions
        ),
    )


__getattr__ = old_names(__name__)
