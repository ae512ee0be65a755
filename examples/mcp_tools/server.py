"""A server of the Model Context Protocol (mcp 2.x; in 1.x the class is called FastMCP) with one tool."""

from mcp.server import MCPServer

server = MCPServer("calculator")


@server.tool()
def add(a: int, b: int) -> int:
    """The sum of two numbers."""
    return a + b


if __name__ == "__main__":
    server.run()
