"""/completions: continue a text or token ids."""

from __future__ import annotations

from itertools import accumulate
from typing import Any, ClassVar

from aiohttp import web
from pydantic import Field

from rollout_workers.gateway.endpoints.requests import AnswerRequest, Count, TokenId, read_body, sampled_ids, usage
from rollout_workers.gateway.endpoints.streaming import stream_data
from rollout_workers.gateway.request_errors import not_offered
from rollout_workers.gateway.session import EpisodeSession, GatewayAnswer
from rollout_workers.gateway.token_texts import token_texts


class CompletionRequest(AnswerRequest):
    not_offered: ClassVar = {**AnswerRequest.not_offered, "echo": False, "suffix": ""}

    prompt: str | tuple[TokenId, ...] = Field(min_length=1)
    logprobs: Count | None = None
    """0 or 1: return those of the sampled tokens. OpenAI's 1 adds the likeliest token, which is not kept here."""


async def completions(request: web.Request, session: EpisodeSession) -> web.StreamResponse:
    asked = await read_body(request, CompletionRequest)
    if asked.logprobs is not None and asked.logprobs > 1:
        raise not_offered("logprobs", "above 1, because only sampled tokens have log-probabilities; give 1")
    continue_prompt = session.continue_text if isinstance(asked.prompt, str) else session.continue_tokens
    answers = await continue_prompt(asked.prompt, asked.generation_args, n=asked.n)  # pyright: ignore[reportArgumentType]
    choices = [_choice(asked, index, answer, session) for index, answer in enumerate(answers)]
    whole = {**asked.head(session, "cmpl", "text_completion"), "choices": choices}
    if asked.stream:
        ending = [{**whole, "choices": [], "usage": usage(answers)}] if asked.stream_options.include_usage else []
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
        choice |= {"prompt_token_ids": answer.turn.place.prompt, **sampled_ids(answer.completion)}
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
