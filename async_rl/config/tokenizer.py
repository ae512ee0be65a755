"""The `tokenizer` section."""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

from pydantic import Field

from async_rl.config.pretrained import Required
from async_rl.config.section import Section


class CharacterTokenizer(Section):
    """A tokenizer of single characters, for small experiments."""

    type: Literal["characters"] = "characters"
    alphabet: str = "0123456789=+-*/()abcdefghijklmnopqrstuvwxyz"
    """One token per character, after the special tokens <pad>, <bos>, <eos>, <unk>."""


class HuggingFaceTokenizer(Required):
    """The tokenizer of a Hugging Face folder with tokenizer.json and, for prompts that are messages, a chat template. Unset
    folder and name: those of `model`.
    """

    type: Literal["huggingface"]


TokenizerConfig = Annotated[CharacterTokenizer | HuggingFaceTokenizer, Field(discriminator="type")]


def with_own_tokenizer(run: Any) -> Any:
    """Complete a run that was not validated yet: a pretrained model comes with its tokenizer.

    A Hugging Face tokenizer without folder and name is that of `model`; so is one that is not described, if `model` has a name.
    """
    match run:
        case {"tokenizer": {"type": "huggingface", **described}, "model": dict(model)}:  # pyright: ignore[reportUnknownVariableType]
            own, is_complete = cast("dict[str, Any]", model), bool({"folder", "name"} & described.keys())
        case {"model": {"name": str(name), **rest}} if name and "tokenizer" not in run:
            described, own, is_complete = dict[str, Any](), {"name": name, **rest}, False
        case _:
            return run
    if is_complete:
        return run
    place = {key: own[key] for key in ("folder", "name", "revision") if own.get(key)}
    return {**run, "tokenizer": {"type": "huggingface", **described, **place}}
