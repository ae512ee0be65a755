"""Prompts and answers as one row of tokens, and which of them the model is meant to say.

The tokens are those of a rollout: a prompt as the run renders it, each answer closed by the end token, and between two answers
what the chat template puts there. So what is learned here is said there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from async_rl.protocols import Tokenizer
from async_rl.types import Message

ASSISTANT = "assistant"


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    token_ids: list[int]
    said: list[bool]
    """By the model."""

    @property
    def num_said(self) -> int:
        """The first token is never predicted."""
        return sum(self.said[1:])

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manner:
    """How prompts are put to the model."""

    tokenizer: Tokenizer
    chat: bool = False
    """A text is a user's message."""
    system: str = ""
    """A message before the prompt's; implies `chat`."""

    def prompt(self, asked: object) -> str | list[Message]:
        """From JSON: a text, or messages. Raises ValueError."""
        if isinstance(asked, str) and not (self.chat or self.system):
            return asked
        return self.told([Message(role="user", content=asked)] if isinstance(asked, str) else read_messages(asked))

    def told(self, messages: Sequence[Message]) -> list[Message]:
        return [*([Message(role="system", content=self.system)] if self.system else []), *messages]


def whole_text(tokenizer: Tokenizer, text: str) -> Text:
    """Said from the beginning to the end."""
    return _joined([(tokenizer.render(""), False), (_closed(tokenizer, text), True)])


def answered(tokenizer: Tokenizer, prompt: str | Sequence[Message], answer: str | Sequence[Message]) -> Text:
    """An answer of several messages goes on after the prompt's: what the assistant says in it counts."""
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
        raise ValueError("no message is the assistant's, so there is nothing to learn")
    return _joined(parts)


def conversation(tokenizer: Tokenizer, messages: Sequence[Message]) -> Text:
    """All that the assistant says in it counts."""
    first = next((place for place, message in enumerate(messages) if message.role == ASSISTANT), len(messages))
    if first == 0:
        raise ValueError("the conversation begins with the assistant; somebody must speak first")
    return answered(tokenizer, messages[:first], messages[first:])


def read_answer(said: object) -> str | tuple[Message, ...]:
    """From JSON: a text, or messages. Raises ValueError."""
    return said if isinstance(said, str) else read_messages(said)


def read_messages(said: object) -> tuple[Message, ...]:
    """From JSON: a list of {role, content}. Raises ValueError."""
    if not isinstance(said, list):
        kinds = "no list" if isinstance(said, str) else "neither a text nor a list"
        raise ValueError(f"has {said!r:.60}, which is {kinds} of messages {{role, content}}")
    return tuple(_read_message(each) for each in cast("list[object]", said))


def _read_message(said: object) -> Message:
    fields = cast("dict[str, Any]", said) if isinstance(said, dict) else {}
    role, content = fields.get("role"), fields.get("content")
    if not isinstance(role, str) or not isinstance(content, str):
        raise ValueError(f"a message must be {{role, content}}, both of them texts, and one is {said!r:.80}")
    if fields.get("tool_calls"):
        raise ValueError("tool calls cannot be learned as such; write them into the assistant's content")
    return Message(role=role, content=content)


def _closed(tokenizer: Tokenizer, answer: str) -> list[int]:
    return [*tokenizer.encode(answer), tokenizer.end_id]


def _joined(parts: Sequence[tuple[list[int], bool]]) -> Text:
    return Text(
        token_ids=[token_id for token_ids, _ in parts for token_id in token_ids],
        said=[is_said for token_ids, is_said in parts for _ in token_ids],
    )
