"""Tools of MCP servers: real ones, in processes of their own. Skipped where the package mcp is not installed."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from async_rl.errors import ConfigError
from async_rl.types import ToolCall
from rollout_workers.agents.tools import McpServer
from rollout_workers.agents.tools.toolbox import open_toolbox

pytest.importorskip("mcp", reason="the optional package mcp is not installed")

PROGRAM = [sys.executable, str(Path(__file__).with_name("mcp_tool_server.py"))]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with subprocess.Popen([*PROGRAM, "http"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}/mcp"
        process.kill()


@pytest.fixture(params=["stdio", "http"])
def server(request: pytest.FixtureRequest) -> McpServer:
    if request.param == "http":
        return McpServer(url=request.getfixturevalue("address"), headers={"Authorization": "Bearer x"})
    return McpServer(command=[*PROGRAM, "stdio"])


async def test_calls_reach_the_server_and_its_errors_reach_the_model(server: McpServer):
    async with open_toolbox([server], timeout_s=200) as toolbox:
        tools = {tool.name: tool for tool in toolbox.tools}
        assert tools["add"].description == "Adds two numbers."
        assert tools["add"].parameters["required"] == ["a", "b"]
        assert await toolbox.answer(ToolCall(name="add", arguments='{"a": 2, "b": 3}')) == "5"
        assert "error" in await toolbox.answer(ToolCall(name="divide", arguments='{"a": 2, "b": 0}'))
        assert "error" in await toolbox.answer(ToolCall(name="add", arguments='{"a": "two"}'))
        assert await toolbox.answer(ToolCall(name="add", arguments='{"a": 1, "b": 1}')) == "2"


async def test_a_server_that_died_fails_the_episode():
    async with open_toolbox([McpServer(command=[*PROGRAM, "stdio"])], timeout_s=200) as toolbox:
        with pytest.raises(ConnectionError, match="is gone"):
            await toolbox.answer(ToolCall(name="die", arguments="{}"))
        with pytest.raises(ConnectionError, match="is gone"):
            await toolbox.answer(ToolCall(name="add", arguments='{"a": 1, "b": 1}'))


@pytest.mark.parametrize(
    "server",
    [
        McpServer(command=[sys.executable, "-c", ""]),
        McpServer(command=["no-such-program"]),
        McpServer(url="http://127.0.0.1:9/mcp"),
    ],
)
async def test_a_server_that_cannot_be_opened_is_named(server: McpServer):
    with pytest.raises(ConfigError, match="cannot be opened"):
        async with open_toolbox([server], timeout_s=200):
            pass
