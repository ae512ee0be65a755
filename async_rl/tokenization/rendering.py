"""Renders prompts and answers as one token row with a mask of the tokens to train.

The tokens equal those of a rollout: the rendered prompt, each answer followed by the end token, and between two answers what
the chat template inserts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from async_rl.protocols import Prompt, Tokenizer
from async_rl.types import Message, Tool, ToolCall

ASSISTANT = "assistant"


class AnswerTokenizer(Tokenizer, Protocol):
    """A tokenizer that also renders messages of the assistant."""

    def encode_answer(self, message: Message) -> list[int]:
        """Token ids of an assistant's message as it was generated, tool calls included, without the end token."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedText:
    token_ids: list[int]
    trained: list[bool]
    """True for tokens of answers."""

    @property
    def num_trained(self) -> int:
        """Trained tokens, without the first of the row, which is never predicted."""
        return sum(self.trained[1:])

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptFormat:
    """How the prompts of a dataset become texts or messages."""

    chat: bool = False
    """Make a text a user message."""
    system: str = ""
    """System message before the prompt; implies `chat`."""

    def prompt(self, asked: object) -> str | tuple[Message, ...]:
        """The prompt from JSON: a text, or messages. Raises ValueError."""
        if isinstance(asked, str) and not (self.chat or self.system):
            return asked
        return self.with_system([Message(role="user", content=asked)] if isinstance(asked, str) else read_messages(asked))

    def with_system(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        return (*([Message(role="system", content=self.system)] if self.system else []), *messages)


def prompt_ids(prompt: Prompt, tokenizer: Tokenizer) -> list[int]:
    """Token ids of a prompt: text and messages are rendered."""
    if isinstance(prompt, str):
        return tokenizer.render(prompt)
    if messages := [part for part in prompt if isinstance(part, Message)]:
        return tokenizer.render(messages)
    return [int(cast("Any", token)) for token in prompt]


def whole_text(tokenizer: Tokenizer, text: str) -> RenderedText:
    """A row of plain text, all of it trained."""
    return _joined([(tokenizer.render(""), False), (_closed(tokenizer, text), True)])


def answered(
    tokenizer: AnswerTokenizer, prompt: str | Sequence[Message], answer: str | Sequence[Message], tools: Sequence[Tool] = ()
) -> RenderedText:
    """A row of a prompt, which offers the tools, and its answer. If the answer is messages, all assistant messages in it are
    trained, with their tool calls."""
    if isinstance(answer, str):
        return _joined([(tokenizer.render(prompt, tools), False), (_closed(tokenizer, answer), True)])
    if isinstance(prompt, str):
        raise ValueError("the answer is a list of messages, so the prompt must be one too (or set data.chat)")
    messages = [*prompt, *answer]
    parts: list[tuple[list[int], bool]] = []
    reached = 0
    for place in range(len(prompt), len(messages)):
        if messages[place].role == ASSISTANT:
            given = messages[reached:place]
            parts.append((tokenizer.render_reply(*given, after_end=True) if parts else tokenizer.render(given, tools), False))
            parts.append(([*tokenizer.encode_answer(messages[place]), tokenizer.end_id], True))
            reached = place + 1
    if not parts:
        raise ValueError("there is no assistant message, so there is nothing to train")
    return _joined(parts)


def conversation(tokenizer: AnswerTokenizer, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> RenderedText:
    """A row of a conversation; all assistant messages are trained. Raises ValueError."""
    first = next((place for place, message in enumerate(messages) if message.role == ASSISTANT), len(messages))
    if first == 0:
        raise ValueError("the conversation begins with the assistant; it must begin with another role")
    return answered(tokenizer, messages[:first], messages[first:], tools)


def read_answer(said: object) -> str | tuple[Message, ...]:
    """The answer from JSON: a text, or messages. Raises ValueError."""
    return said if isinstance(said, str) else read_messages(said)


def read_messages(said: object) -> tuple[Message, ...]:
    """Messages from JSON: a list of {role, content}. Raises ValueError."""
    if not isinstance(said, list):
        kinds = "no list" if isinstance(said, str) else "neither a text nor a list"
        raise ValueError(f"has {said!r:.60}, which is {kinds} of messages {{role, content}}")
    return tuple(_read_message(each) for each in cast("list[object]", said))


def read_tools(said: object) -> tuple[Tool, ...]:
    """Tools from JSON, or from text that is JSON: a list of {name, description, parameters}, each perhaps inside of
    {type: function, function: ...}. Raises ValueError."""
    listed = _from_text(said)
    if not isinstance(listed, list):
        raise ValueError(f"has tools that are no list: {said!r:.80}")
    return tuple(_read_tool(each) for each in cast("list[object]", listed))


def _read_tool(said: object) -> Tool:
    fields = _function(said)
    name, description, parameters = fields.get("name"), fields.get("description"), _from_text(fields.get("parameters"))
    if not isinstance(name, str) or not isinstance(parameters, dict | None) or not isinstance(description, str | None):
        raise ValueError(f"a tool must be {{name, description, parameters}}, but one is {said!r:.80}")
    schema = cast("dict[str, Any]", parameters) if parameters is not None else {}
    return Tool(name=name, description=description if description is not None else "", parameters=schema)


def _read_message(said: object) -> Message:
    fields = cast("dict[str, Any]", said) if isinstance(said, dict) else {}
    role, content, calls, answers = (fields.get(key) for key in ("role", "content", "tool_calls", "tool_call_id"))
    if content is None and calls:
        content = ""
    if not isinstance(role, str) or not isinstance(content, str):
        raise ValueError(f"a message must be {{role, content}}, both strings, but one is {said!r:.80}")
    if calls and role != ASSISTANT:
        raise ValueError(f"only the assistant makes tool_calls, but a message of {role!r} has some")
    listed = cast("list[object]", calls) if isinstance(calls, list) else [calls] if calls else []
    return Message(
        role=role,
        content=content,
        tool_calls=tuple(_read_call(each) for each in listed),
        tool_call_id=answers if isinstance(answers, str) else "",
    )


def _read_call(said: object) -> ToolCall:
    fields = _function(said)
    name, arguments = fields.get("name"), fields.get("arguments")
    if not isinstance(name, str) or not isinstance(arguments, str | dict):
        raise ValueError(f"a tool call must be {{name, arguments}}, but one is {said!r:.80}")
    call_id = cast("dict[str, Any]", said).get("id")
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return ToolCall(name=name, arguments=written, id=call_id if isinstance(call_id, str) else "")


def _function(said: object) -> dict[str, Any]:
    """The fields of a tool or a call, without OpenAI's wrapper {type: function, function: ...}."""
    fields = cast("dict[str, Any]", said) if isinstance(said, dict) else {}
    inside = fields.get("function")
    return cast("dict[str, Any]", inside) if isinstance(inside, dict) else fields


def _from_text(said: object) -> object:
    """The value of JSON text, anything else as it is. Parquet has one type per column, so mixed values are kept as text."""
    if not isinstance(said, str):
        return said
    try:
        return json.loads(said)
    except ValueError as error:
        raise ValueError(f"has {said!r:.80}, which is not JSON: {error}") from error


def _closed(tokenizer: Tokenizer, answer: str) -> list[int]:
    return [*tokenizer.encode(answer), tokenizer.end_id]


def _joined(parts: Sequence[tuple[list[int], bool]]) -> RenderedText:
    return RenderedText(
        token_ids=[token_id for token_ids, _ in parts for token_id in token_ids],
        trained=[is_trained for token_ids, is_trained in parts for _ in token_ids],
    )
