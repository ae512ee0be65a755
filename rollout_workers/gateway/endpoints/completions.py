"""/completions: continue a text or token ids."""

from __future__ import annotations

import secrets
import time
from itertools import accumulate
from typing import Any, ClassVar

from aiohttp import web
from pydantic import Field

from rollout_workers.gateway.endpoints.requests import (
    Count,
    SamplingFields,
    StreamOptions,
    TokenId,
    read_body,
    usage,
    versions_of,
)
from rollout_workers.gateway.endpoints.streaming import stream_data
from rollout_workers.gateway.request_errors import not_offered
from rollout_workers.gateway.session import EpisodeSession, GatewayAnswer
from rollout_workers.gateway.token_texts import token_texts


class CompletionRequest(SamplingFields):
    not_offered: ClassVar = {**SamplingFields.not_offered, "echo": False, "suffix": ""}

    model: str | None = None
    prompt: str | tuple[TokenId, ...] = Field(min_length=1)
    logprobs: Count | None = None
    """0 or 1: return those of the sampled tokens. OpenAI's 1 adds the likeliest token, which is not kept here."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None


async def completions(request: web.Request, session: EpisodeSession) -> web.StreamResponse:
    asked = await read_body(request, CompletionRequest)
    if asked.logprobs is not None and asked.logprobs > 1:
        raise not_offered("logprobs", "above 1, because only sampled tokens have log-probabilities; give 1")
    continue_prompt = session.continue_text if isinstance(asked.prompt, str) else session.continue_tokens
    answers = await continue_prompt(asked.prompt, asked.generation_args, n=asked.n)  # pyright: ignore[reportArgumentType]
    whole = {
        "id": f"cmpl-{secrets.token_hex(12)}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": asked.model if asked.model is not None else session.name,
        "choices": [_choice(asked, index, answer, session) for index, answer in enumerate(answers)],
    }
    if asked.stream:
        counts_tokens = asked.stream_options is not None and asked.stream_options.include_usage
        ending = [{**whole, "choices": [], "usage": usage(answers)}] if counts_tokens else []
        return await stream_data(request, [whole, *ending])
    return web.json_response({**whole, "usage": usage(answers)})


def _choice(asked: CompletionRequest, index: int, answer: GatewayAnswer, session: EpisodeSession) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": index,
        "text": answer.message.content,
        "finish_reason": answer.finish_reason,
        "logprobs": _logprobs(answer, session) if asked.logprobs is not None else None,
    }
    if asked.return_token_ids:
        choice |= {
            "prompt_token_ids": answer.turn.place.prompt,
            "token_ids": answer.completion.token_ids.tolist(),
            "versions": versions_of(answer.completion),
        }
    return choice


def _logprobs(answer: GatewayAnswer, session: EpisodeSession) -> dict[str, Any]:
    texts = token_texts(answer.completion, session.tokenizer)
    offsets = list(accumulate(map(len, texts), initial=0))[:-1]
    return {
        "tokens": texts,
        "token_logprobs": answer.completion.logprobs.tolist(),
        "top_logprobs": None,
        "text_offset": offsets,
    }
