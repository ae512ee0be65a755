"""/responses: OpenAI's conversation endpoint whose history is a list of items instead of messages."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from aiohttp import web
from pydantic import BeforeValidator, Field

from async_rl.protocols import GenerationArgs
from async_rl.types import Message, Tool, ToolCall
from rollout_workers.gateway.endpoints.requests import (
    AnswerRequest,
    CalledWire,
    Count,
    FormatWire,
    FunctionWire,
    MessageWire,
    RequestFields,
    Text,
    parses_calls,
    read_as,
    read_body,
    usage,
)
from rollout_workers.gateway.endpoints.streaming import stream_events
from rollout_workers.gateway.request_errors import RequestError
from rollout_workers.gateway.session import EpisodeSession, GatewayAnswer


class MessageItem(MessageWire):
    type: Literal["message"]


class CallItem(CalledWire):
    type: Literal["function_call"]
    call_id: str


class OutputItem(RequestFields):
    type: Literal["function_call_output"]
    call_id: str
    output: Text = ""


class ReasoningItem(RequestFields):
    type: Literal["reasoning"]


def _typed(item: object) -> object:
    """Items with a role are messages, even without a type."""
    return {"type": "message", **item} if isinstance(item, dict) and "role" in item else item


Item = Annotated[
    Annotated[MessageItem | CallItem | OutputItem | ReasoningItem, Field(discriminator="type")], BeforeValidator(_typed)
]


class FunctionItem(FunctionWire):
    type: Literal["function"]


class TextOptions(RequestFields):
    format: FormatWire | None = None


class ResponsesRequest(AnswerRequest):
    not_offered: ClassVar = {**AnswerRequest.not_offered, "background": False, "conversation": "", "top_logprobs": 0}

    input: str | tuple[Item, ...]
    instructions: str | None = None
    tools: tuple[Annotated[Tool, read_as(FunctionItem, FunctionItem.tool)], ...] = ()
    tool_choice: Any = None
    text: TextOptions | None = None
    max_output_tokens: Count | None = None
    previous_response_id: str | None = None

    @property
    def generation_args(self) -> GenerationArgs:
        return GenerationArgs(max_tokens=self.max_output_tokens).over(super().generation_args)


async def responses(request: web.Request, session: EpisodeSession) -> web.StreamResponse:
    asked = await read_body(request, ResponsesRequest)
    if asked.n > 1:
        raise RequestError(400, "n is not offered by /responses: ask several times, or use /chat/completions", param="n")
    instructions = [Message(role="system", content=asked.instructions)] if asked.instructions is not None else []
    messages = [*_earlier(asked, session), *_messages(asked.input)]
    [answer] = await session.chat(
        [*instructions, *messages],
        asked.tools,
        asked.generation_args,
        n=1,
        parses_calls=parses_calls(asked.tool_choice, asked.tools),
    )
    whole = _response(asked, answer, session)
    session.stored[whole["id"]] = (*messages, answer.message)
    if asked.stream:
        return await stream_events(request, _numbered(_events(whole)))
    return web.json_response(whole)


def _earlier(asked: ResponsesRequest, session: EpisodeSession) -> Sequence[Message]:
    """The messages of the previous response; its instructions do not carry over."""
    if asked.previous_response_id is None:
        return ()
    if (stored := session.stored.get(asked.previous_response_id)) is None:
        raise RequestError(
            400, f"this episode has no response {asked.previous_response_id!r} to go on from", param="previous_response_id"
        )
    return stored


def _messages(given: str | Sequence[MessageItem | CallItem | OutputItem | ReasoningItem]) -> list[Message]:
    """Convert items to messages. Calls join the answer before them in one message."""
    if isinstance(given, str):
        return [Message(role="user", content=given)]
    messages: list[Message] = []
    for item in given:
        if isinstance(item, MessageItem):
            messages.append(item.message())
        elif isinstance(item, OutputItem):
            messages.append(Message(role="tool", content=item.output, tool_call_id=item.call_id))
        elif isinstance(item, CallItem):
            call = ToolCall(name=item.name, arguments=item.arguments, id=item.call_id)
            answer = messages.pop() if messages and messages[-1].role == "assistant" else Message(role="assistant", content="")
            messages.append(Message(role="assistant", content=answer.content, tool_calls=(*answer.tool_calls, call)))
    return messages


def _response(asked: ResponsesRequest, answer: GatewayAnswer, session: EpisodeSession) -> dict[str, Any]:
    is_cut = answer.finish_reason == "length"
    counted = usage([answer])
    extra: dict[str, Any] = {}
    if asked.return_token_ids:
        extra = {"prompt_token_ids": answer.turn.place.prompt, "token_ids": answer.completion.token_ids.tolist()}
    return {
        "id": f"resp_{secrets.token_hex(12)}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "error": None,
        "model": asked.model if asked.model is not None else session.name,
        "instructions": asked.instructions,
        "previous_response_id": asked.previous_response_id,
        "output": _output(answer.message),
        "parallel_tool_calls": True,
        "tool_choice": "auto" if asked.tool_choice is None else asked.tool_choice,
        "tools": [],
        "temperature": asked.temperature,
        "top_p": asked.top_p,
        "metadata": {},
        "usage": {
            "input_tokens": counted["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": counted["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": counted["total_tokens"],
        },
        **extra,
    }


def _output(message: Message) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if message.content or not message.tool_calls:
        content = [{"type": "output_text", "text": message.content, "annotations": []}]
        head = {"type": "message", "id": f"msg_{secrets.token_hex(12)}", "role": "assistant", "status": "completed"}
        items.append({**head, "content": content})
    items += [
        {
            "type": "function_call",
            "id": f"fc_{secrets.token_hex(12)}",
            "call_id": call.id,
            "name": call.name,
            "arguments": call.arguments,
            "status": "completed",
        }
        for call in message.tool_calls
    ]
    return items


def _events(whole: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The response as a stream of events: created empty, then every item is added, filled and done."""
    begun = {**whole, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    yield {"type": "response.created", "response": begun}
    yield {"type": "response.in_progress", "response": begun}
    for index, item in enumerate(whole["output"]):
        yield from _item_events(index, item)
    yield {"type": f"response.{whole['status']}", "response": whole}


def _item_events(index: int, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
    where = {"item_id": item["id"], "output_index": index}
    if item["type"] == "message":
        [part] = item["content"]
        empty, inside = {**item, "status": "in_progress", "content": []}, {**where, "content_index": 0}
        yield {"type": "response.output_item.added", "output_index": index, "item": empty}
        yield {"type": "response.content_part.added", **inside, "part": {**part, "text": ""}}
        yield {"type": "response.output_text.delta", **inside, "delta": part["text"], "logprobs": []}
        yield {"type": "response.output_text.done", **inside, "text": part["text"], "logprobs": []}
        yield {"type": "response.content_part.done", **inside, "part": part}
    else:
        empty, arguments = {**item, "status": "in_progress", "arguments": ""}, item["arguments"]
        yield {"type": "response.output_item.added", "output_index": index, "item": empty}
        yield {"type": "response.function_call_arguments.delta", **where, "delta": arguments}
        yield {"type": "response.function_call_arguments.done", **where, "name": item["name"], "arguments": arguments}
    yield {"type": "response.output_item.done", "output_index": index, "item": item}


def _numbered(events: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    return ({**event, "sequence_number": number} for number, event in enumerate(events))
