"""/inference/v1/generate, /tokenize and /detokenize as in vLLM, for clients that render conversations themselves."""

from __future__ import annotations

import secrets
from typing import Any, ClassVar

from aiohttp import web
from pydantic import Field

from async_rl.types import StopReason
from rollout_workers.gateway.endpoints.requests import (
    MessageWire,
    RequestFields,
    SamplingFields,
    TokenId,
    ToolWire,
    read_body,
    usage,
    versions_of,
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
    token_ids = answer.completion.token_ids.tolist()
    logprobs = [
        {"token": f"token_id:{token}", "logprob": logprob, "top_logprobs": []}
        for token, logprob in zip(token_ids, answer.completion.logprobs.tolist(), strict=True)
    ]
    return {
        "index": index,
        "token_ids": token_ids,
        "finish_reason": "length" if answer.completion.stop_reason is StopReason.LENGTH else "stop",
        "logprobs": {"content": logprobs},
        "versions": versions_of(answer.completion),
    }


class TokenizeRequest(RequestFields):
    prompt: str | None = None
    messages: tuple[MessageWire, ...] | None = None
    tools: tuple[ToolWire, ...] | None = None

    def token_ids(self, session: EpisodeSession) -> list[int]:
        if self.messages is None:
            return session.tokenizer.render(self.prompt if self.prompt is not None else "")
        tools = [tool.function.tool() for tool in self.tools] if self.tools is not None else []
        return session.tokenizer.render([message.message() for message in self.messages], tools)


async def tokenize(request: web.Request, session: EpisodeSession) -> web.StreamResponse:
    token_ids = (await read_body(request, TokenizeRequest)).token_ids(session)
    return web.json_response({"tokens": token_ids, "count": len(token_ids), "max_model_len": session.context_tokens})


class DetokenizeRequest(RequestFields):
    tokens: tuple[TokenId, ...]


async def detokenize(request: web.Request, session: EpisodeSession) -> web.StreamResponse:
    asked = await read_body(request, DetokenizeRequest)
    return web.json_response({"prompt": session.tokenizer.decode(asked.tokens)})
