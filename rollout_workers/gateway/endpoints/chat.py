"""/chat/completions: OpenAI's conversation endpoint, with tools and streams."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from aiohttp import web
from pydantic import Field

from async_rl.protocols import GenerationArgs, Tokenizer
from async_rl.types import Completion, ToolCall
from rollout_workers.gateway.endpoints.requests import (
    AnswerRequest,
    Count,
    FormatWire,
    GivenMessage,
    GivenTool,
    parses_calls,
    read_body,
    sampled_ids,
    usage,
)
from rollout_workers.gateway.endpoints.streaming import stream_data
from rollout_workers.gateway.session import EpisodeSession, GatewayAnswer
from rollout_workers.gateway.token_texts import token_texts


class ChatRequest(AnswerRequest):
    not_offered: ClassVar = {**AnswerRequest.not_offered, "functions": [], "top_logprobs": 0}

    messages: tuple[GivenMessage, ...] = Field(min_length=1)
    tools: tuple[GivenTool, ...] = ()
    tool_choice: Any = None
    response_format: FormatWire | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool = False

    @property
    def generation_args(self) -> GenerationArgs:
        return GenerationArgs(max_tokens=self.max_completion_tokens).over(super().generation_args)


async def chat_completions(request: web.Request, session: EpisodeSession) -> web.StreamResponse:
    asked = await read_body(request, ChatRequest)
    answers = await session.chat(
        asked.messages,
        asked.tools,
        asked.generation_args,
        n=asked.n,
        parses_calls=parses_calls(asked.tool_choice, asked.tools),
    )
    if asked.stream:
        return await stream_data(request, _chunks(asked, answers, session))
    choices = [_choice(asked, index, answer, session.tokenizer) for index, answer in enumerate(answers)]
    whole = {**asked.head(session, "chatcmpl", "chat.completion"), "choices": choices, "usage": usage(answers)}
    return web.json_response({**whole, **_prompt_ids(asked, answers)})


def _choice(asked: ChatRequest, index: int, answer: GatewayAnswer, tokenizer: Tokenizer) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.message.content}
    if answer.message.tool_calls:
        message["tool_calls"] = [_call(call) for call in answer.message.tool_calls]
        if not answer.message.content:
            message["content"] = None
    return {
        "index": index,
        "message": message,
        "finish_reason": answer.finish_reason,
        "logprobs": _logprobs(answer.completion, tokenizer) if asked.logprobs else None,
        **(sampled_ids(answer.completion) if asked.return_token_ids else {}),
    }


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _logprobs(completion: Completion, tokenizer: Tokenizer) -> dict[str, Any]:
    """Log-probabilities of the sampled tokens; alternatives are not kept. The tokens' bytes add up to the text."""
    content: list[dict[str, Any]] = []
    for text, logprob in zip(token_texts(completion, tokenizer), completion.logprobs.tolist(), strict=True):
        content.append({"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []})
    return {"content": content, "refusal": None}


def _prompt_ids(asked: ChatRequest, answers: Sequence[GatewayAnswer]) -> dict[str, Any]:
    return {"prompt_token_ids": answers[0].turn.place.prompt} if asked.return_token_ids else {}


def _chunks(asked: ChatRequest, answers: Sequence[GatewayAnswer], session: EpisodeSession) -> Iterator[dict[str, Any]]:
    """The chunks of a stream: role, text, calls, end."""
    head = asked.head(session, "chatcmpl", "chat.completion.chunk")

    def chunk(index: int, delta: dict[str, Any], finish_reason: str | None = None, **more: Any) -> dict[str, Any]:
        return {**head, "choices": [{"index": index, "delta": delta, "finish_reason": finish_reason, **more}]}

    for index, answer in enumerate(answers):
        yield {**chunk(index, {"role": "assistant", "content": ""}), **_prompt_ids(asked, answers)}
        logprobs = _logprobs(answer.completion, session.tokenizer) if asked.logprobs else None
        ids = sampled_ids(answer.completion) if asked.return_token_ids else {}
        yield chunk(index, {"content": answer.message.content}, logprobs=logprobs, **ids)
        for position, call in enumerate(answer.message.tool_calls):
            yield chunk(index, {"tool_calls": [{"index": position, **_call(call)}]})
        yield chunk(index, {}, answer.finish_reason)
    if asked.stream_options.include_usage:
        yield {**head, "choices": [], "usage": usage(answers)}
