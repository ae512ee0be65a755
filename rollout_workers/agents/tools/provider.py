"""The protocol of a source of tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, runtime_checkable

from async_rl.types import Tool


class ToolError(Exception):
    """A call failed in a way the model should read: its text is the result of the call."""


class OpenTools(Protocol):
    """Tools ready to be called."""

    @property
    def tools(self) -> Sequence[Tool]: ...

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Call a tool. A ToolError is returned to the model; any other exception fails the episode."""
        ...


@runtime_checkable
class ToolProvider(Protocol):
    """A source of one or more tools, such as an MCP server."""

    def open(self) -> AbstractAsyncContextManager[OpenTools]:
        """Open the tools. They stay open while the agent does, shared by all episodes."""
        ...
