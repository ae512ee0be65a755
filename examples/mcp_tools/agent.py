"""The model may call the tools of an MCP server. The server is started once, for all episodes of a worker."""

import sys
from pathlib import Path

from async_rl import Task
from rollout_workers import McpServer, ToolAgent


class Calculator(ToolAgent):
    max_turns = 4

    def task(self, index: int) -> Task:
        one, other = self.random(index).choices(range(10, 100), k=2)
        return self.new_task(index, f"{one}+{other}=", answer=str(one + other))

    def tools(self):
        return [McpServer(command=[sys.executable, str(Path(__file__).with_name("server.py"))])]

    def reward(self, task: Task, response: str) -> float:
        return float(task.answer in response)
