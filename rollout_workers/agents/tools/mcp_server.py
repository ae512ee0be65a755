"""A server of the Model Context Protocol as a source of tools: a program with stdin and stdout, or an address.

    McpServer(command=["python", "my_tools.py"])        McpServer(url="http://localhost:8000/mcp")

Needs the package `mcp`, 1.x or 2.x. The library starts the program and ends it when the session closes.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from async_rl.errors import ConfigError
from async_rl.types import Tool
from rollout_workers.agents.tools.provider import ToolError

CONNECTION_CLOSED = -32000
"""Error code of a closed connection, which the library reports like an answer of the server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class McpServer:
    command: Sequence[str] = ()
    """Command of a server that speaks over stdin and stdout."""
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    """Environment variables for that program, beside the few that are always passed on."""
    url: str = ""
    """Address of a server that listens (streamable HTTP)."""
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    """HTTP headers to send, such as a token."""
    open_timeout_s: float = 120.0

    def __post_init__(self) -> None:
        if bool(self.command) == bool(self.url):
            raise ConfigError("an MCP server is named by its command or by its url: give one of the two")

    @asynccontextmanager
    async def open(self) -> AsyncGenerator[_McpTools]:
        opened: asyncio.Future[_McpTools] = asyncio.get_running_loop().create_future()
        close = asyncio.Event()
        # The library requires that the task which opened a session closes it.
        serving = asyncio.create_task(self._serve(opened, close), name="mcp session")
        try:
            yield await opened
        finally:
            close.set()
            if not opened.done() or opened.cancelled():
                serving.cancel()
            await asyncio.wait([serving])

    async def _serve(self, opened: asyncio.Future[_McpTools], close: asyncio.Event) -> None:
        try:
            async with AsyncExitStack() as stack:
                async with asyncio.timeout(self.open_timeout_s):
                    tools = await self._connect(stack)
                opened.set_result(tools)
                await close.wait()
        except Exception as error:  # the library wraps errors in several ways; once open, calls report a lost server
            if not opened.done():
                named = self.url if self.url else " ".join(self.command)
                opened.set_exception(ConfigError(f"the MCP server {named} cannot be opened: {_cause(error)}"))

    async def _connect(self, stack: AsyncExitStack) -> _McpTools:
        mcp = _library()
        read, write, *_ = await stack.enter_async_context(await self._streams(stack))
        session = await stack.enter_async_context(mcp.ClientSession(read, write))
        await session.initialize()
        return _McpTools(session, await _listed(session))

    async def _streams(self, stack: AsyncExitStack) -> Any:
        if self.command:
            from mcp.client.stdio import StdioServerParameters, stdio_client  # pyright: ignore[reportMissingImports]

            program, *arguments = self.command
            return stdio_client(StdioServerParameters(command=program, args=arguments, env=dict(self.env)))
        streamable_http: Any = import_module("mcp.client.streamable_http")
        client = await stack.enter_async_context(streamable_http.create_mcp_http_client(headers=dict(self.headers)))
        return streamable_http.streamable_http_client(self.url, http_client=client)


class _McpTools:
    def __init__(self, session: Any, tools: Sequence[Tool]) -> None:
        self._session = session
        self.tools = tools

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        import anyio

        mcp = _library()
        refused = mcp.MCPError if hasattr(mcp, "MCPError") else mcp.McpError
        gone = ConnectionError(f"the MCP server of tool {name!r} is gone")
        try:
            result = await self._session.call_tool(name, dict(arguments))
        except (anyio.ClosedResourceError, anyio.BrokenResourceError) as error:
            raise gone from error
        except refused as error:
            if error.error.code == CONNECTION_CLOSED:
                raise gone from error
            raise ToolError(str(error)) from error
        text = _text_of(result)
        if _field(result, "is_error"):
            raise ToolError(text)
        return text


def _library() -> Any:
    try:
        import mcp  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError("MCP servers need the package mcp: pip install 'async-rl[mcp]'") from error
    return mcp


async def _listed(session: Any) -> list[Tool]:
    """List the tools, page by page."""
    from mcp.types import PaginatedRequestParams  # pyright: ignore[reportMissingImports]

    tools: list[Tool] = []
    cursor: str | None = None
    while True:
        page = await session.list_tools(params=PaginatedRequestParams(cursor=cursor))
        for tool in page.tools:
            description = tool.description if tool.description is not None else ""
            tools.append(Tool(name=tool.name, description=description, parameters=_field(tool, "input_schema")))
        cursor = _field(page, "next_cursor")
        if cursor is None:
            return tools


def _text_of(result: Any) -> str:
    texts = [part.text if part.type == "text" else f"[{part.type}]" for part in result.content]
    if not texts and (structured := _field(result, "structured_content")) is not None:
        return json.dumps(structured, ensure_ascii=False)
    return "\n".join(texts)


def _field(value: Any, name: str) -> Any:
    """Read a field: `input_schema` in 2.x is `inputSchema` in 1.x."""
    if hasattr(value, name):
        return getattr(value, name)
    first, *others = name.split("_")
    return getattr(value, first + "".join(other.capitalize() for other in others))


def _cause(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) if str(error) else type(error).__name__
