"""The `tokenizer` section."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from async_rl.config.section import Section


class CharacterTokenizer(Section):
    """A tokenizer of single characters, for small experiments."""

    type: Literal["characters"] = "characters"
    alphabet: str = "0123456789=+-*/()abcdefghijklmnopqrstuvwxyz"
    """One token per character, after the special tokens <pad>, <bos>, <eos>, <unk>."""


class HuggingFaceTokenizer(Section):
    """The tokenizer of a Hugging Face folder."""

    type: Literal["huggingface"]
    folder: Path
    """A folder with tokenizer.json and, for prompts that are messages, a chat template. Nothing is downloaded."""


TokenizerConfig = Annotated[CharacterTokenizer | HuggingFaceTokenizer, Field(discriminator="type")]
