"""Renders prompts and answers as one token row with a mask of the tokens to train.

The tokens equal those of a rollout: the rendered prompt, each answer followed by the end token, and between two answers what
the chat template inserts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from async_rl.protocols import Prompt, Tokenizer
from async_rl.types import Message

ASSISTANT = "assistant"


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


def answered(tokenizer: Tokenizer, prompt: str | Sequence[Message], answer: str | Sequence[Message]) -> RenderedText:
    """A row of a prompt and its answer. If the answer is messages, all assistant messages in it are trained."""
    if isinstance(answer, str):
        return _joined([(tokenizer.render(prompt), False), (_closed(tokenizer, answer), True)])
    if isinstance(prompt, str):
        raise ValueError("the answer is a list of messages, so the prompt must be one too (or set data.chat)")
    messages = [*prompt, *answer]
    parts: list[tuple[list[int], bool]] = []
    reached = 0
    for place in range(len(prompt), len(messages)):
        if messages[place].role == ASSISTANT:
            given = messages[reached:place]
            parts.append((tokenizer.render_reply(*given, after_end=True) if parts else tokenizer.render(given), False))
            parts.append((_closed(tokenizer, messages[place].content), True))
            reached = place + 1
    if not parts:
        raise ValueError("there is no assistant message, so there is nothing to train")
    return _joined(parts)


def conversation(tokenizer: Tokenizer, messages: Sequence[Message]) -> RenderedText:
    """A row of a conversation; all assistant messages are trained. Raises ValueError."""
    first = next((place for place, message in enumerate(messages) if message.role == ASSISTANT), len(messages))
    if first == 0:
        raise ValueError("the conversation begins with the assistant; it must begin with another role")
    return answered(tokenizer, messages[:first], messages[first:])


def read_answer(said: object) -> str | tuple[Message, ...]:
    """The answer from JSON: a text, or messages. Raises ValueError."""
    return said if isinstance(said, str) else read_messages(said)


def read_messages(said: object) -> tuple[Message, ...]:
    """Messages from JSON: a list of {role, content}. Raises ValueError."""
    if not isinstance(said, list):
        kinds = "no list" if isinstance(said, str) else "neither a text nor a list"
        raise ValueError(f"has {said!r:.60}, which is {kinds} of messages {{role, content}}")
    return tuple(_read_message(each) for each in cast("list[object]", said))


def _read_message(said: object) -> Message:
    fields = cast("dict[str, Any]", said) if isinstance(said, dict) else {}
    role, content = fields.get("role"), fields.get("content")
    if not isinstance(role, str) or not isinstance(content, str):
        raise ValueError(f"a message must be {{role, content}}, both strings, but one is {said!r:.80}")
    if fields.get("tool_calls"):
        raise ValueError("tool_calls are not supported; write them into the assistant's content")
    return Message(role=role, content=content)


def _closed(tokenizer: Tokenizer, answer: str) -> list[int]:
    return [*tokenizer.encode(answer), tokenizer.end_id]


def _joined(parts: Sequence[tuple[list[int], bool]]) -> RenderedText:
    return RenderedText(
        token_ids=[token_id for token_ids, _ in parts for token_id in token_ids],
        trained=[is_trained for token_ids, is_trained in parts for _ in token_ids],
    )
