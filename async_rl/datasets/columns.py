"""Reads a row: columns by dotted path, conditions, and templates over the columns.

reward_model.ground_truth     the value `ground_truth` of the mapping in column `reward_model`
messages.0.content            the first of a list; -1 is the last
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

from async_rl.config.hub.datasets import RowFilter
from async_rl.datasets.rows import Row
from async_rl.errors import ConfigError


class MissingColumn(ValueError):
    """A row has no such column. The message continues a sentence that begins with the row's place."""


def column(row: Row, path: str) -> Any:
    """The value at a dotted path; a column whose own name has dots comes first. Raises MissingColumn."""
    if path in row:
        return row[path]
    value: Any = row
    reached: list[str] = []
    for step in path.split("."):
        if isinstance(value, Mapping) and step in value:
            value = cast("Mapping[str, Any]", value)[step]
        elif isinstance(value, list) and _is_index(step, items := cast("list[Any]", value)):
            value = items[int(step)]
        else:
            raise MissingColumn(f"has no column {path!r}; {'.'.join(reached) if reached else 'it'} has {_content(value)}")
        reached.append(step)
    return value


def column_or_none(row: Row, path: str) -> Any:
    """The value at a dotted path, None if there is none."""
    try:
        return column(row, path)
    except MissingColumn:
        return None


def meets(row: Row, condition: RowFilter) -> bool:
    """Return whether a row meets all conditions of a filter. A missing column counts as null."""
    value = column_or_none(row, condition.column)
    if condition.equals is not None and not _is_same(value, condition.equals):
        return False
    if condition.one_of and not any(_is_same(value, each) for each in condition.one_of):
        return False
    if condition.matches and (value is None or re.search(condition.matches, _text(value)) is None):
        return False
    return condition.max_characters is None or _characters(value) <= condition.max_characters


class Template:
    """A Jinja template over the columns of a row, in a sandbox: {{ question }}, or {{ row["a name"] }}. A column that the row
    lacks is an error."""

    def __init__(self, text: str) -> None:
        """Raises ConfigError."""
        from jinja2 import StrictUndefined, TemplateSyntaxError  # late: few datasets have a template
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
        try:
            self._template = environment.from_string(text)
        except TemplateSyntaxError as error:
            raise ConfigError(f"the template {text!r:.100} is not valid: {error}") from error

    def __call__(self, row: Row) -> str:
        """Render a row. Raises ValueError; its message continues a sentence that begins with the row's place."""
        try:
            return self._template.render({"row": row, **row})
        except Exception as error:  # a template calls methods of values, which raise anything
            raise ValueError(f"does not fit the template: {error}") from error


def _is_index(step: str, items: list[Any]) -> bool:
    return re.fullmatch(r"-?\d{1,9}", step) is not None and -len(items) <= int(step) < len(items)


def _content(value: Any) -> str:
    match value:
        case Mapping():
            return ", ".join(map(str, cast("Mapping[Any, Any]", value)))
        case list():
            return f"{len(cast('list[Any]', value))} items"
        case _:
            return f"{value!r:.60}"


def _is_same(value: Any, wanted: Any) -> bool:
    """Equal, but true is not 1."""
    return value == wanted and isinstance(value, bool) == isinstance(wanted, bool)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else str(value)


def _characters(value: Any) -> int:
    match value:
        case None:
            return 0
        case Mapping():
            return sum(map(_characters, cast("Mapping[Any, Any]", value).values()))
        case list():
            return sum(map(_characters, cast("list[Any]", value)))
        case _:
            return len(_text(value))
