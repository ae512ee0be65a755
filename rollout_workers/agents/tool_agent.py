"""Episodes with tools: the model's calls are answered until it answers without one.

prompt and tools ─▶ generate ─▶ calls? ─▶ the tools' answers ─▶ generate ─▶ ... ─▶ reward
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from async_rl.protocols import EpisodeContext, InferenceInterface
from async_rl.types import Message, Rollout, Task, Tool, Turn
from rollout_workers.agents.reward_only import RewardOnlyAgent
from rollout_workers.agents.tools.toolbox import AnyTools, Toolbox, open_toolbox
from rollout_workers.chat.tool_calls import ToolCallFormat, parse


@dataclass(kw_only=True)
class ToolAgent(RewardOnlyAgent):
    """Subclass it with `task`, `tools` and `reward`. Use as `async with`: what it opens, all its episodes share."""

    tool_format: ToolCallFormat = "hermes"
    """How the model writes a call."""
    tool_timeout_s: float = 30.0
    """For one call. The model hears of it, and the episode goes on."""
    max_calls: int = 32
    """Of one episode: further ones are refused."""

    @abstractmethod
    def tools(self) -> Sequence[AnyTools]:
        """Functions, and providers such as `McpServer`. Asked once, when the agent is opened."""

    async def __aenter__(self) -> Self:
        self._opened = AsyncExitStack()
        self._toolbox = await self._opened.enter_async_context(open_toolbox(self.tools(), timeout_s=self.tool_timeout_s))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
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
        """Tools are offered by a chat template, so a text prompt becomes a user's message."""
        if isinstance(task.prompt, str):
            task = replace(task, prompt=(Message(role="user", content=task.prompt),))
        return await super().rollout(task, inference, context)

    async def get_observation(self, task: Task, turns: Sequence[Turn]) -> Sequence[Message] | None:
        """The answers to the calls of the last turn, in their order; None when there were none."""
        calls = self.read(turns[-1].text).tool_calls
        if not calls:
            return None
        left = self.max_calls - sum(len(self.read(turn.text).tool_calls) for turn in turns[:-1])
        answers: list[Message] = []
        for number, call in enumerate(calls):  # one after another: the second may rely on what the first has done
            refusal = f"error: no more than {self.max_calls} calls may be made"
            content = await self.toolbox.answer(call) if number < left else refusal
            answers.append(Message(role="tool", content=content, tool_call_id=call.id))
        return answers
