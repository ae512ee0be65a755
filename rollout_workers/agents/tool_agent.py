"""Episodes with tools: calls are executed until the model answers without one.

prompt and tools ─▶ generate ─▶ calls? ─▶ results ─▶ generate ─▶ ... ─▶ reward
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Self

from async_rl.protocols import EpisodeContext, InferenceInterface
from async_rl.types import Message, Rollout, Task, Tool, Turn
from rollout_workers.agents.reward_only import RewardOnlyAgent
from rollout_workers.agents.tools.toolbox import AnyTools, Toolbox, open_toolbox
from rollout_workers.chat.tool_calls import ToolCallFormat, parse


@dataclass(kw_only=True)
class ToolAgent(RewardOnlyAgent):
    """Subclass it with `task`, `tools` and `reward`. Enter it with `async with`: all its episodes share the tools."""

    tool_format: ToolCallFormat = "hermes"
    """How the model writes a call."""
    tool_timeout_s: float = 30.0
    """Time limit of one call. A call that exceeds it returns an error to the model, and the episode goes on."""
    max_calls: int = 32
    """Maximum number of calls in one episode; further ones return an error."""

    @abstractmethod
    def tools(self) -> Sequence[AnyTools]:
        """Return functions, and providers such as `McpServer`. Called once, when the agent is entered."""

    async def __aenter__(self) -> Self:
        self._opened = AsyncExitStack()
        self._toolbox = await self._opened.enter_async_context(open_toolbox(self.tools(), timeout_s=self.tool_timeout_s))
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self._opened.aclose()

    def offered_tools(self, task: Task) -> Sequence[Tool]:
        return self.toolbox.tools

    @property
    def toolbox(self) -> Toolbox:
        if not hasattr(self, "_toolbox"):
            raise RuntimeError(f"{type(self).__name__} holds tools: open it first, with `async with agent`")
        return self._toolbox

    def read(self, text: str) -> Message:
        said, calls = parse(text, self.tool_format)
        numbered = tuple(replace(call, id=f"call_{number}") for number, call in enumerate(calls))
        return Message(role="assistant", content=said, tool_calls=numbered)

    async def rollout(self, task: Task, inference: InferenceInterface, context: EpisodeContext) -> Rollout:
        """Play one episode. A text prompt becomes a user message, because chat templates offer the tools."""
        if isinstance(task.prompt, str):
            task = replace(task, prompt=(Message(role="user", content=task.prompt),))
        return await super().rollout(task, inference, context)

    async def get_observation(self, task: Task, turns: Sequence[Turn]) -> Sequence[Message] | None:
        """Return the results of the last turn's calls, in their order; None without calls."""
        calls = self.read(turns[-1].text).tool_calls
        if not calls:
            return None
        left = self.max_calls - sum(len(self.read(turn.text).tool_calls) for turn in turns[:-1])
        answers: list[Message] = []
        for number, call in enumerate(calls):  # in order: a call may rely on what an earlier one did
            refusal = f"error: no more than {self.max_calls} calls may be made"
            content = await self.toolbox.answer(call) if number < left else refusal
            answers.append(Message(role="tool", content=content, tool_call_id=call.id))
        return answers
