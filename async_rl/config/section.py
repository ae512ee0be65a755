"""The base class of all configuration sections: immutable, no unknown keys, the text under a field is its description."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    def with_absolute_paths(self) -> dict[str, Any]:
        """The values of all fields, with absolute paths, for processes with another working directory."""
        return _absolute(self.model_dump())


def _absolute(value: Any) -> Any:
    match value:
        case Path():
            return value.absolute()
        case dict():
            return {key: _absolute(each) for key, each in value.items()}  # pyright: ignore[reportUnknownVariableType]
        case _:
            return value
