"""Any backend for evaluation, opponents and judges: fields its completions lack get placeholders."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np

from async_rl.protocols import GenerationArgs, InferenceInterface, Prompt, Tokenizer
from async_rl.types import Completion, StopReason, VersionSpan
from rollout_workers.inference.interface import Inference

NO_VERSION = -1
"""Version of tokens that no version of the run sampled."""


class EvaluationInference(Inference):
    """Wraps a backend; its completions are not for training. `always` overrides the arguments of agents."""

    def __init__(self, inference: InferenceInterface, always: GenerationArgs | None = None) -> None:
        self.tokenizer = inference.tokenizer
        self._inference = inference
        self._always = always if always is not None else GenerationArgs()
        self._loop = asyncio.get_running_loop()

    async def _generate(self, prompt: Prompt, args: GenerationArgs) -> Completion:
        return with_placeholders(await self._inference.generate(prompt, self._always.over(args)), self.tokenizer)


def with_placeholders(completion: Completion, tokenizer: Tokenizer) -> Completion:
    """Fill in missing fields: ids by tokenizing the text, log-probabilities with 0, versions with NO_VERSION."""
    token_ids = completion.token_ids
    if not len(token_ids):
        ended = [tokenizer.end_id] if completion.stop_reason is StopReason.END else []
        token_ids = np.array([*tokenizer.encode(completion.text), *ended], np.int32)
    length = len(token_ids)
    has_logprobs = len(completion.logprobs) == length
    unversioned = (VersionSpan(version=NO_VERSION, start=0, stop=length),) if length else ()
    return replace(
        completion,
        token_ids=token_ids,
        logprobs=completion.logprobs if has_logprobs else np.zeros(length, np.float32),
        versions=completion.versions if completion.versions else unversioned,
    )
