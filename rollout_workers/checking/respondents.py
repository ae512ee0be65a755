"""What answers the tasks of a check: a script, or a model."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from async_rl.config import Config
from async_rl.errors import ConfigError
from async_rl.models.from_config import model_shape
from async_rl.protocols import InferenceInterface, Tokenizer
from async_rl.tokenization.tokenizers import open_tokenizer
from async_rl.types import Task
from rollout_workers.checking.findings import RIGHT
from rollout_workers.checking.trials import Answerers
from rollout_workers.inference.scripted import Scripted


@dataclass(frozen=True, slots=True, kw_only=True)
class Respondents:
    answerers: Answerers
    tokenizer: Tokenizer
    context_tokens: int


@asynccontextmanager
async def open_respondents(config: Config, *, script: str | None, model: str | None) -> AsyncGenerator[Respondents]:
    if model is None:
        yield _scripted(config, script)
        return
    from rollout_workers.evaluation.subject import LiveRun, find_subject  # late: it imports much, which a script does not need

    subject = find_subject(model, config)
    if isinstance(subject, LiveRun):
        raise ConfigError("--model live is for `async-rl eval`; name a folder, a url, or a model under policies")
    from rollout_workers.evaluation.models import open_model  # later still: it imports torch

    async with open_model(subject, config, os.environ) as opened:
        inference = opened.inference
        yield Respondents(
            answerers=lambda task: [("the model", inference)] * config.batch.group_size,
            tokenizer=inference.tokenizer,
            context_tokens=opened.context_tokens,
        )


def _scripted(config: Config, script: str | None) -> Respondents:
    tokenizer = open_tokenizer(config.tokenizer)
    context_tokens = model_shape(config.model, tokenizer.vocab_size).context_tokens

    def answerers(task: Task) -> list[tuple[str, InferenceInterface]]:
        said = guesses(task) if script is None else {"the script": _lines(script)}
        return [(name, Scripted(answers, tokenizer=tokenizer, context_tokens=context_tokens)) for name, answers in said.items()]

    return Respondents(answerers=answerers, tokenizer=tokenizer, context_tokens=context_tokens)


def guesses(task: Task) -> dict[str, list[str]]:
    """The task's own answer, a wrong one and an empty one; for a task without answer, its prompt and an empty one."""
    prompt = task.prompt if isinstance(task.prompt, str) else task.prompt[-1].content
    if not task.answer:
        return {"an echo": [prompt], "nothing": [""]}
    backwards = task.answer[::-1]
    other = next((letter for letter in prompt if letter != task.answer[0]), "0")
    wrong = backwards if backwards != task.answer else other + task.answer[1:]
    return {RIGHT: [task.answer], "wrong": [wrong], "nothing": [""]}


def _lines(script: str) -> list[str]:
    """The lines of a file are answers in turn; any other text is the answer itself."""
    path = Path(script)
    return path.read_text().splitlines() if script and path.is_file() else [script]
