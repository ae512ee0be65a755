"""Tools that a model may call: Python functions, and servers of the Model Context Protocol."""

from rollout_workers.agents.tools.mcp_server import McpServer
from rollout_workers.agents.tools.provider import ToolError, ToolProvider

__all__ = ["McpServer", "ToolError", "ToolProvider"]
