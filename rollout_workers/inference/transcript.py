"""A tokenizer for models whose own is unknown: a token is a character, and special tokens separate messages.

    <message> {"role": "user", "content": "3="} <end>   <answer> 4567 <end>   <message> ...

With it an agent that works with token ids can use a server that only takes messages: `read` recovers them. Text
between the special tokens, such as an observation, counts as a user message.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from async_rl.types import Message, Tool, ToolCall
from rollout_workers.chat.tool_calls import parse, write

JsonObject = dict[str, Any]
_CHARACTERS = 0x110000
_END, _MESSAGE, _ANSWER, _TOOL = range(_CHARACTERS, _CHARACTERS + 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """The messages and tools of a chat request."""

    messages: list[JsonObject]
    tools: list[JsonObject]


class Transcript:
    vocab_size = _CHARACTERS + 4
    end_id = _END

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(token) for token in token_ids if token < _CHARACTERS)

    def render(self, prompt: str | Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        messages = [Message(role="user", content=prompt)] if isinstance(prompt, str) else prompt
        offered = [token for tool in tools for token in self._marked(_TOOL, json.dumps(tool_to_json(tool)))]
        return [*offered, *self.render_reply(*messages, after_end=True)]

    def render_reply(self, *messages: Message, after_end: bool) -> list[int]:
        """Every answer already ends with an end token, also one cut by a limit, so `after_end` does not matter."""
        return [token for message in messages for token in self._marked(_MESSAGE, json.dumps(message_to_json(message)))]

    def answer(self, content: str, calls: Sequence[ToolCall] = ()) -> list[int]:
        """Token ids of an answer, with its tool calls written into the text."""
        return self._marked(_ANSWER, "\n".join([content, write(calls)]) if calls else content)

    def _marked(self, mark: int, text: str) -> list[int]:
        return [mark, *self.encode(text), _END]


def read(token_ids: Sequence[int]) -> Conversation:
    """Recover the conversation from token ids. Tool calls are numbered and matched to results in order."""
    messages: list[JsonObject] = []
    tools: list[JsonObject] = []
    unanswered: deque[str] = deque()
    calls = 0
    for mark, text in _parts(token_ids):
        if mark == _TOOL:
            tools.append(json.loads(text))
            continue
        if mark == _ANSWER:
            message = _answer_to_json(text, calls)
            unanswered = deque(call["id"] for call in message.get("tool_calls", ()))
            calls += len(unanswered)
        elif mark == _MESSAGE:
            message = json.loads(text)
            if message["role"] == "tool" and unanswered:
                message["tool_call_id"] = unanswered.popleft()
        else:
            message = {"role": "user", "content": text}
        messages.append(message)
    return Conversation(messages=messages, tools=tools)


def _parts(token_ids: Sequence[int]) -> Iterator[tuple[int | None, str]]:
    """Yield each special token with the text up to the next; text after an end token has none."""
    mark: int | None = None
    text: list[str] = []
    for token in [*token_ids, _END]:
        if token < _CHARACTERS:
            text.append(chr(token))
            continue
        if mark is not None or text:
            yield mark, "".join(text)
        mark, text = (token if token != _END else None), []


def _answer_to_json(text: str, first_call: int) -> JsonObject:
    content, calls = parse(text)
    numbered = tuple(replace(call, id=f"call_{number}") for number, call in enumerate(calls, start=first_call))
    return message_to_json(Message(role="assistant", content=content, tool_calls=numbered))


def message_to_json(message: Message) -> JsonObject:
    said: JsonObject = {"role": message.role, "content": message.content}
    if message.tool_calls:
        said["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        said["tool_call_id"] = message.tool_call_id
    return said


def tool_to_json(tool: Tool) -> JsonObject:
    function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": function}
