"""From a row of a table to an example: tokenized texts with a mask of the trained tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Protocol

from async_rl.tokenization.rendering import (
    PromptFormat,
    RenderedText,
    answered,
    conversation,
    read_answer,
    read_messages,
    whole_text,
)

COLUMNS = ("prompt", "response", "messages", "text", "chosen", "rejected")


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """An example: the texts of one row of the table."""

    texts: tuple[RenderedText, ...]
    """One text, or the chosen and the rejected one. They stay in one packed row."""

    def __len__(self) -> int:
        return sum(len(text) for text in self.texts)


class RowFormat(Protocol):
    """The columns of a table and how they become texts."""

    @property
    def wanted(self) -> str:
        """The needed columns, for error messages."""
        ...

    def texts(self, row: Mapping[str, Any]) -> tuple[RenderedText, ...] | None:
        """Return the texts of a row, None if columns are missing. Raises ValueError."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleReader:
    """Reads rows of a table as examples."""

    kind: RowFormat
    columns: Mapping[str, str]
    """Our column names -> those of the table (data.columns)."""

    def __call__(self, row: Mapping[str, Any]) -> Example:
        """Read a row. Raises ValueError; its message continues a sentence that begins with the row's place."""
        names = {ours: self.columns.get(ours, ours) for ours in COLUMNS}
        texts = self.kind.texts({ours: row[theirs] for ours, theirs in names.items() if row.get(theirs) is not None})
        if texts is None:
            raise ValueError(f"has the columns {', '.join(row)}; needed are {self.kind.wanted} (data.columns renames them)")
        if any(text.num_trained == 0 for text in texts):
            raise ValueError("has no token to train on")
        return Example(texts=texts)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionFormat:
    """A text for supervised training or distillation."""

    prompt_format: PromptFormat
    wanted = "prompt and response, or messages, or text"

    def texts(self, row: Mapping[str, Any]) -> tuple[RenderedText, ...] | None:
        tokenizer = self.prompt_format.tokenizer
        if "prompt" in row and "response" in row:
            return (answered(tokenizer, self.prompt_format.prompt(row["prompt"]), read_answer(row["response"])),)
        if "messages" in row:
            return (conversation(tokenizer, self.prompt_format.with_system(read_messages(row["messages"]))),)
        if "text" in row:
            return (whole_text(tokenizer, _text(row["text"])),)
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceFormat:
    """A better and a worse answer, for DPO and reward models."""

    prompt_format: PromptFormat
    wanted = "chosen and rejected, and prompt where these do not contain it"

    def texts(self, row: Mapping[str, Any]) -> tuple[RenderedText, ...] | None:
        if "chosen" not in row or "rejected" not in row:
            return None
        chosen, rejected = read_answer(row["chosen"]), read_answer(row["rejected"])
        if chosen == rejected:
            raise ValueError("has the same answer as chosen and as rejected")
        if "prompt" in row:
            prompt = self.prompt_format.prompt(row["prompt"])
        elif isinstance(chosen, str) or isinstance(rejected, str):
            raise ValueError("has no prompt, so chosen and rejected must be whole conversations")
        else:
            shared = [mine for mine, _ in takewhile(lambda both: both[0] == both[1], zip(chosen, rejected, strict=False))]
            prompt, chosen, rejected = self.prompt_format.with_system(shared), chosen[len(shared) :], rejected[len(shared) :]
        return answered(self.prompt_format.tokenizer, prompt, chosen), answered(self.prompt_format.tokenizer, prompt, rejected)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"has a text that is not a string: {value!r:.60}")
    return value
