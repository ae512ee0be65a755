"""Tokenizers: single characters for small experiments, or a Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from async_rl.config.tokenizer import CharacterTokenizer, HuggingFaceTokenizer
from async_rl.errors import ConfigError
from async_rl.types import Message, Tool, ToolCall


def open_tokenizer(config: CharacterTokenizer | HuggingFaceTokenizer) -> Characters | HuggingFace:
    if isinstance(config, CharacterTokenizer):
        return Characters(config.alphabet)
    return HuggingFace(config.place)


class Characters:
    """One token per character of an alphabet, after four special tokens. Other characters become <unk>."""

    pad_id, bos_id, end_id, unknown_id = range(4)
    num_special = 4
    unknown_text = "\N{REPLACEMENT CHARACTER}"

    def __init__(self, alphabet: str) -> None:
        if not alphabet or len(set(alphabet)) != len(alphabet):
            raise ConfigError("tokenizer.alphabet must hold at least one character, and each of them once")
        self.vocab_size = self.num_special + len(alphabet)
        self._ids = {character: position for position, character in enumerate(alphabet, start=self.num_special)}
        self._texts = ["", "", "", self.unknown_text, *alphabet]

    def encode(self, text: str) -> list[int]:
        return [self._ids.get(character, self.unknown_id) for character in text]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Decode to text. Special tokens are omitted except <unk>, which becomes U+FFFD so that positions are kept."""
        return "".join(self._texts[token_id] if token_id < self.vocab_size else self.unknown_text for token_id in token_ids)

    def render(self, prompt: str | Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        offered = "".join(f"tool {tool.name}: {json.dumps(tool.parameters)}\n" for tool in tools)
        text = prompt if isinstance(prompt, str) else "".join(_line(message) for message in prompt)
        return [self.bos_id, *self.encode(offered + text)]

    def render_reply(self, *messages: Message, after_end: bool) -> list[int]:
        closing = "" if after_end else "\n"
        return self.encode(closing + "".join(_line(message) for message in messages))

    def encode_answer(self, message: Message) -> list[int]:
        """Token ids of an assistant's message as it was generated, tool calls included, without the end token."""
        return self.encode(_said(message))


def _line(message: Message) -> str:
    return f"{message.role}: {_said(message)}\n"


def _said(message: Message) -> str:
    written = [{"name": call.name, "arguments": _arguments(call)} for call in message.tool_calls]
    calls = "".join(f"<tool_call>{json.dumps(call, ensure_ascii=False)}</tool_call>" for call in written)
    return f"{message.content}{calls}"


class HuggingFace:
    """The tokenizer and the chat template of a Hugging Face folder. Nothing is downloaded."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = _load(folder)
        if self._tokenizer.eos_token_id is None:
            raise ConfigError(f"the tokenizer in {folder} has no end token: set eos_token in its tokenizer_config.json")
        self._folder = folder
        self.vocab_size: int = len(self._tokenizer)
        self.end_id: int = self._tokenizer.eos_token_id

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def render(self, prompt: str | Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        if isinstance(prompt, str):
            return self._tokenizer.encode(prompt)
        return self.encode(self._apply_template(prompt, tools))

    def render_reply(self, *messages: Message, after_end: bool) -> list[int]:
        """Token ids after an answer, found by rendering a placeholder answer with the chat template.

        Changes that a template makes to earlier answers (removing reasoning, trimming) do not affect the result, so sampled
        tokens stay as they are.
        """
        answered = [Message(role="user", content="?"), Message(role="assistant", content=_ANSWER), *messages]
        _, found, after_answer = self._apply_template(answered).partition(_ANSWER)
        if not found:
            raise ConfigError(f"the chat template of {self._folder} does not render assistant messages")
        token_ids = self.encode(after_answer)
        return token_ids[1:] if after_end and token_ids[:1] == [self.end_id] else token_ids

    def encode_answer(self, message: Message) -> list[int]:
        """Token ids of an assistant's message as it was generated, tool calls included, without the end token.

        What the chat template writes around an answer without calls is taken off. Raises ValueError if the template renders
        no tool calls.
        """
        if not message.tool_calls:
            return self.encode(message.content)
        asked = Message(role="user", content=_QUESTION)
        before, _, after = self._after(asked, Message(role="assistant", content=_ANSWER)).partition(_ANSWER)
        written = self._after(asked, message)
        body = written.removeprefix(before).removesuffix(after)
        if len(written) != len(before) + len(body) + len(after):
            raise ValueError(f"the chat template of {self._folder} puts other words around tool calls than around answers")
        if any(call.name not in body for call in message.tool_calls):
            raise ValueError(f"the chat template of {self._folder} does not render tool calls")
        return self.encode(body)

    def _after(self, asked: Message, answer: Message) -> str:
        """What the chat template writes after a question."""
        _, found, after = self._apply_template([asked, answer]).partition(_QUESTION)
        if not found:
            raise ConfigError(f"the chat template of {self._folder} does not render the user's messages")
        return after

    def _apply_template(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> str:
        """Render with the chat template. Raises ValueError if the template refuses the conversation."""
        from jinja2 import TemplateError  # imported late: only needed with a chat template

        if not self._tokenizer.chat_template:
            raise ConfigError(f"the tokenizer in {self._folder} has no chat template: give prompts as text, or add one")
        try:
            return self._tokenizer.apply_chat_template(
                [_for_template(message) for message in messages],
                tools=[_tool_for_template(tool) for tool in tools] if tools else None,
                tokenize=False,
                add_generation_prompt=True,
                return_dict=False,
            )
        except (TemplateError, TypeError) as error:
            raise ValueError(f"the chat template cannot render this conversation: {error}") from error


_QUESTION, _ANSWER = "[[a question]]", "[[an answer]]"


def _for_template(message: Message) -> dict[str, Any]:
    """A message as templates expect it: OpenAI's fields, but arguments as objects."""
    written: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        written["tool_calls"] = [
            {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": _arguments(call)}}
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        written["tool_call_id"] = message.tool_call_id
    return written


def _tool_for_template(tool: Tool) -> dict[str, Any]:
    described = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": described}


def _arguments(call: ToolCall) -> Any:
    """The parsed arguments, or the text if it is not JSON."""
    try:
        return json.loads(call.arguments)
    except (ValueError, RecursionError):
        return call.arguments


def has_tokenizer(folder: Path) -> bool:
    """Whether a Hugging Face folder has files of a tokenizer."""
    return any(any(folder.glob(pattern)) for pattern in ("tokenizer*", "vocab.*", "*.model"))


def _load(folder: Path) -> Any:
    from transformers.models.auto.tokenization_auto import AutoTokenizer  # imported late: takes seconds and imports torch

    if not folder.is_dir():
        raise ConfigError(f"tokenizer.folder {folder} is not a folder")
    if not has_tokenizer(folder):  # transformers would make an empty one
        raise ConfigError(f"tokenizer.folder {folder} has no tokenizer: no file such as tokenizer.json")
    try:
        return cast("Any", AutoTokenizer).from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"tokenizer.folder {folder} has no tokenizer that can be loaded: {error}") from error
