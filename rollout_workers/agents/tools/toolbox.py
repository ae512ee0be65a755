"""The tools of several sources, by name. Mistakes of the model are returned to the model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from async_rl.errors import ConfigError
from async_rl.types import Tool, ToolCall
from rollout_workers.agents.tools.function_tool import FunctionTool
from rollout_workers.agents.tools.provider import OpenTools, ToolError, ToolProvider

AnyTools = Callable[..., Any] | ToolProvider
"""A function is one tool; a provider, such as an MCP server, may have many."""


class Toolbox:
    def __init__(self, sources: Sequence[OpenTools], *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._sources: dict[str, OpenTools] = {}
        self.tools: tuple[Tool, ...] = tuple(tool for source in sources for tool in source.tools)
        for source in sources:
            for tool in source.tools:
                if tool.name in self._sources:
                    raise ConfigError(f"two tools are called {tool.name!r}: a model could not tell them apart")
                self._sources[tool.name] = source

    async def answer(self, call: ToolCall) -> str:
        """Execute a call. Returns its result, or what was wrong with the call."""
        deadline = asyncio.timeout(self._timeout_s)
        try:
            async with deadline:
                return await self._result(call)
        except ToolError as error:
            return f"error: {error}"
        except TimeoutError:
            if not deadline.expired():
                raise
            return f"error: no result within {self._timeout_s:g} s"

    async def _result(self, call: ToolCall) -> str:
        if call.name not in self._sources:
            raise ToolError(f"there is no tool {call.name!r}; there are {', '.join(self._sources)}")
        try:
            arguments = json.loads(call.arguments)
        except (ValueError, RecursionError) as error:
            raise ToolError(f"the arguments are not JSON: {error}") from error
        if not isinstance(arguments, dict):
            raise ToolError("the arguments must be a JSON object")
        return await self._sources[call.name].call(call.name, arguments)


@asynccontextmanager
async def open_toolbox(tools: Sequence[AnyTools], *, timeout_s: float) -> AsyncGenerator[Toolbox]:
    async with AsyncExitStack() as stack:
        sources = [
            await stack.enter_async_context(source.open()) if isinstance(source, ToolProvider) else FunctionTool(source)
            for source in tools
        ]
        yield Toolbox(sources, timeout_s=timeout_s)
