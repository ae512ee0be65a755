"""/inference/v1/generate, /tokenize and /detokenize as in vLLM, for clients that render conversations themselves."""

from __future__ import annotations

import secrets
from typing import Any, ClassVar

from aiohttp import web
from pydantic import Field

from rollout_workers.gateway.endpoints.requests import (
    GivenMessage,
    GivenTool,
    RequestFields,
    SamplingFields,
    TokenId,
    read_body,
    sampled_ids,
    usage,
)
from rollout_workers.gateway.session import EpisodeSession, GatewayAnswer


class GenerateRequest(RequestFields):
    not_offered: ClassVar = {"features": {}, "content_parts": [], "stream": False}

    token_ids: tuple[TokenId, ...] = Field(min_length=1)
    sampling_params: SamplingFields = SamplingFields()


async def generate(request: web.Request, session: EpisodeSession) -> web.StreamResponse:
    asked = await read_body(request, GenerateRequest)
    answers = await session.continue_tokens(asked.token_ids, asked.sampling_params.generation_args, n=asked.sampling_params.n)
    choices = [_token_choice(index, answer) for index, answer in enumerate(answers)]
    return web.json_response({"request_id": secrets.token_hex(12), "choices": choices, "usage": usage(answers)})


def _token_choice(index: int, answer: GatewayAnswer) -> dict[str, Any]:
    completion = answer.completion
    logprobs = [
        {"token": f"token_id:{token}", "logprob": logprob, "top_logprobs": []}
        for token, logprob in zip(completion.token_ids.tolist(), completion.logprobs.tolist(), strict=True)
    ]
    head = {"index": index, "finish_reason": answer.finish_reason, "logprobs": {"content": logprobs}}
    return {**head, **sampled_ids(completion)}


class TokenizeRequest(RequestFields):
    prompt: str = ""
    messages: tuple[GivenMessage, ...] | None = None
    tools: tuple[GivenTool, ...] = ()


async def tokenize(request: web.Request, session: EpisodeSession) -> web.StreamResponse:
    asked = await read_body(request, TokenizeRequest)
    if asked.messages is None:
        token_ids = session.tokenizer.render(asked.prompt)
    else:
        token_ids = session.tokenizer.render(asked.messages, asked.tools)
    return web.json_response({"tokens": token_ids, "count": len(token_ids), "max_model_len": session.context_tokens})


class DetokenizeRequest(RequestFields):
    tokens: tuple[TokenId, ...]


async def detokenize(request: web.Request, session: EpisodeSession) -> web.StreamResponse:
    asked = await read_body(request, DetokenizeRequest)
    return web.json_response({"prompt": session.tokenizer.decode(asked.tokens)})
