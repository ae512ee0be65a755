"""A dataset in a configuration: where its rows come from, and which of them are used."""

from __future__ import annotations

import re
from pathlib import Path

from pydantic import PositiveInt, field_validator, model_validator

from async_rl.config.hub.snapshot import hub_snapshot
from async_rl.config.section import Section
from async_rl.imports.shipped_files import own_or_shipped

SUFFIXES = (".parquet", ".jsonl", ".json")
"""Files of rows that can be read."""
README = "README.md"
"""The card of a dataset, which may list its subsets and splits."""

SPLIT = re.compile(r"(?P<name>[\w.-]+)(?:\[(?P<start>-?\d+%?)?:(?P<stop>-?\d+%?)?\])?")


_COMMIT = re.compile(r"[0-9a-f]{40}")


class RowFilter(Section):
    """A condition on one column. Rows that do not meet it are left out. Several conditions in one filter must all be met."""

    column: str
    """Column, or a dotted path into one."""
    equals: str | int | float | bool | None = None
    """The value is this one. Unset: any."""
    one_of: tuple[str | int | float | bool | None, ...] = ()
    """The value is one of these; `null` stands for a missing one. Empty: any."""
    matches: str = ""
    """This regular expression is found in the value, written as text. Empty: any."""
    max_characters: PositiveInt | None = None
    """The value's text is at most this long; of lists and mappings all texts inside count together."""

    @field_validator("matches")
    @classmethod
    def _is_a_regular_expression(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{pattern!r} is not a regular expression: {error}") from error
        return pattern

    @model_validator(mode="after")
    def _has_a_condition(self) -> RowFilter:
        if self.equals is None and not self.one_of and not self.matches and self.max_characters is None:
            raise ValueError("a filter needs a condition: equals, one_of (also [null]), matches or max_characters")
        return self


class DatasetConfig(Section):
    """A dataset."""

    path: str
    """A .jsonl, .json or .parquet file, a folder of such files or one written by `save_to_disk`, or the name of a dataset on
    the Hugging Face Hub, for example openai/gsm8k (docs/datasets.md)."""
    subset: str = ""
    """Subset (configuration) of a dataset that has several, for example main."""
    split: str = "train"
    """Split of a dataset that has several, or a part of it: train[:95%], train[-500:]."""
    revision: str = ""
    """Branch, tag or commit of a dataset on the Hub. Empty: the newest. A run's config.yaml has the commit."""
    filters: tuple[RowFilter, ...] = ()
    """Use only the rows that meet all of these conditions."""

    @field_validator("split")
    @classmethod
    def _is_a_split(cls, split: str) -> str:
        if SPLIT.fullmatch(split) is None:
            raise ValueError(f"{split!r} is not a split such as train, train[:95%] or train[1000:2000]")
        return split

    @property
    def place(self) -> str:
        """The path, resolved to a shipped file if there is none of the user's."""
        return str(own_or_shipped(Path(self.path)))

    @property
    def is_on_hub(self) -> bool:
        """Whether the path is the name of a dataset on the Hub: nothing local has it, and it does not look like a file."""
        path = Path(self.place)
        return not (
            path.exists()
            or path.suffix in SUFFIXES
            or self.path.startswith((".", "/", "~"))
            or self.path.count("/") > 1
            or not self.path
        )

    @property
    def has_commit(self) -> bool:
        """Whether the revision is a commit."""
        return _COMMIT.fullmatch(self.revision) is not None

    def commit(self) -> str:
        """The commit that `revision` stands for; unless it is one, fetches the dataset's card. Raises ConfigError."""
        if self.has_commit:
            return self.revision
        return hub_snapshot("dataset", self.path, self.revision, (README,)).name
