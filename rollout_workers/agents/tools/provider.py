"""What a source of tools must offer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, runtime_checkable

from async_rl.types import Tool


class ToolError(Exception):
    """A call went wrong in a way that the model should hear of: its text is the answer."""


class OpenTools(Protocol):
    @property
    def tools(self) -> Sequence[Tool]: ...

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """What the tool answers. Raises ToolError to tell the model; anything else fails the episode."""
        ...


@runtime_checkable
class ToolProvider(Protocol):
    def open(self) -> AbstractAsyncContextManager[OpenTools]:
        """Open as long as the worker lives: all episodes share it."""
        ...
