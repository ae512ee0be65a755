"""A tokenizer for models with random weights; only its limit ends a generation."""

from __future__ import annotations

from collections.abc import Sequence

from async_rl.types import Message, Tool


class TokenIds:
    end_id = -1

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def encode(self, text: str) -> list[int]:
        return [ord(character) % self.vocab_size for character in text]

    def decode(self, token_ids: Sequence[int]) -> str:
        return ""

    def render(self, prompt: str | Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        raise NotImplementedError("prompts are token ids here")

    def render_reply(self, *messages: Message, after_end: bool) -> list[int]:
        raise NotImplementedError("prompts are token ids here")
