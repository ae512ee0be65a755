"""A server of tools for the tests, in its own process: `python mcp_tool_server.py stdio | http`. For mcp 1.x and 2.x."""

import os
import socket
import sys

try:
    from mcp.server import MCPServer as Server
except ImportError:
    from mcp.server.fastmcp import FastMCP as Server

server = Server("arithmetic")


@server.tool()
def add(a: int, b: int) -> str:
    """Adds two numbers."""
    return str(a + b)


@server.tool()
def divide(a: int, b: int) -> str:
    return str(a // b)


@server.tool()
def die() -> str:
    os._exit(1)


def serve_http() -> None:
    """On a port of its own choosing, which is the first thing it prints."""
    import uvicorn

    listening = socket.create_server(("127.0.0.1", 0))
    print(listening.getsockname()[1], flush=True)
    config = uvicorn.Config(server.streamable_http_app(), log_level="error")
    uvicorn.Server(config).run(sockets=[listening])


if __name__ == "__main__":
    server.run("stdio") if sys.argv[1] == "stdio" else serve_http()
