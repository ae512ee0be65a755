"""From a row of a table to an example: tokenized texts with a mask of the trained tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from async_rl.config.training import DataConfig, ExampleDataset
from async_rl.datasets.columns import Template, column_or_none
from async_rl.tokenization.rendering import (
    AnswerTokenizer,
    PromptFormat,
    RenderedText,
    answered,
    conversation,
    read_answer,
    read_messages,
    read_tools,
    whole_text,
)
from async_rl.types import Tool

COLUMNS = ("prompt", "response", "messages", "text", "tools", "chosen", "rejected")
COMPLETION_COLUMNS = "prompt and response, or messages, or text"
PAIR_COLUMNS = "chosen and rejected, and prompt where these do not contain it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    texts: tuple[RenderedText, ...]
    """One text, or the chosen and the rejected one. They stay in one packed row."""

    def __len__(self) -> int:
        return sum(len(text) for text in self.texts)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleReader:
    tokenizer: AnswerTokenizer
    prompt_format: PromptFormat
    columns: Mapping[str, str]
    """Our column names -> those of the table (data.columns)."""
    template: Template | None = None
    """Makes the prompt."""
    compares: bool
    """A row is a better and a worse answer, for DPO and reward models; else a text for supervised training or distillation."""

    @staticmethod
    def of(data: DataConfig, tokenizer: AnswerTokenizer, *, compares: bool) -> ExampleReader:
        prompt_format = PromptFormat(chat=data.chat, system=data.system)
        reader = ExampleReader(tokenizer=tokenizer, prompt_format=prompt_format, columns={}, compares=compares)
        return reader.for_dataset(data)

    def for_dataset(self, dataset: ExampleDataset) -> ExampleReader:
        """The same for the columns and the template of a dataset. Raises ConfigError."""
        return replace(self, columns=dataset.columns, template=Template(dataset.template) if dataset.template else None)

    def __call__(self, row: Mapping[str, Any]) -> Example:
        """Read a row. Raises ValueError; its message continues a sentence that begins with the row's place."""
        names = {ours: self.columns.get(ours, ours) for ours in COLUMNS}
        read = {ours: column_or_none(row, theirs) for ours, theirs in names.items()}
        given = {ours: value for ours, value in read.items() if value is not None}
        if self.template is not None:
            given["prompt"] = self.template(row)
        texts = self._pair(given) if self.compares else self._completion(given)
        if texts is None:
            wanted = PAIR_COLUMNS if self.compares else COMPLETION_COLUMNS
            raise ValueError(f"has the columns {', '.join(row)}; needed are {wanted} (data.columns renames them)")
        if any(text.num_trained == 0 for text in texts):
            raise ValueError("has no token to train on")
        return Example(texts=texts)

    def _completion(self, given: Mapping[str, Any]) -> tuple[RenderedText, ...] | None:
        """Return the text of a row, None if columns are missing. Raises ValueError."""
        tools = _tools(given)
        if "prompt" in given and "response" in given:
            prompt = self.prompt_format.prompt(given["prompt"])
            return (answered(self.tokenizer, prompt, read_answer(given["response"]), tools),)
        if "messages" in given:
            return (conversation(self.tokenizer, self.prompt_format.with_system(read_messages(given["messages"])), tools),)
        if "text" in given:
            return (whole_text(self.tokenizer, _text(given["text"])),)
        return None

    def _pair(self, given: Mapping[str, Any]) -> tuple[RenderedText, ...] | None:
        """Return the better and the worse answer, None if columns are missing. Raises ValueError."""
        if "chosen" not in given or "rejected" not in given:
            return None
        chosen, rejected = read_answer(given["chosen"]), read_answer(given["rejected"])
        if chosen == rejected:
            raise ValueError("has the same answer as chosen and as rejected")
        if "prompt" in given:
            prompt = self.prompt_format.prompt(given["prompt"])
        elif isinstance(chosen, str) or isinstance(rejected, str):
            raise ValueError("has no prompt, so chosen and rejected must be whole conversations")
        else:
            shared = [mine for mine, _ in takewhile(lambda both: both[0] == both[1], zip(chosen, rejected, strict=False))]
            prompt, chosen, rejected = self.prompt_format.with_system(shared), chosen[len(shared) :], rejected[len(shared) :]
        tools = _tools(given)
        return answered(self.tokenizer, prompt, chosen, tools), answered(self.tokenizer, prompt, rejected, tools)


def _tools(given: Mapping[str, Any]) -> tuple[Tool, ...]:
    return read_tools(given["tools"]) if "tools" in given else ()


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"has a text that is not a string: {value!r:.60}")
    return value
