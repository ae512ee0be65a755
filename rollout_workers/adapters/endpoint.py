"""Agents with their own loop and SDK: they get the address of the model, and their output is scored.

    @openai_agent(tasks=[("2+3=", "5")], reward=lambda task, answer: float(answer == task.answer))
    async def agent(base_url, api_key, task):
        client = AsyncOpenAI(base_url=base_url, api_key=api_key)
        said = await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": task.prompt}])
        return said.choices[0].message.content

The gateway records what was sampled as tokens, whatever the agent does with the text.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from async_rl.protocols import EpisodeContext, InferenceInterface
from async_rl.types import Rollout, Status, StopReason, Task
from rollout_workers.adapters.task_rows import RewardFunction, Rows, RowTasks
from rollout_workers.agents.task_stream import TaskStream
from rollout_workers.episodes.rewards import Score, as_score
from rollout_workers.episodes.stage_timeouts import scoring
from rollout_workers.registry import MAKE_AGENT
from rollout_workers.user_functions import awaited, call_user_function

AgentFunction = Callable[[str, str, Task], Any | Awaitable[Any]]
F = TypeVar("F", bound=AgentFunction)


@dataclass(kw_only=True)
class EndpointAgent(TaskStream):
    """Subclass it with `task`, `act` and `reward`."""

    model: str = "policy"
    """Name of the model at the endpoint."""
    length_is_truncation: bool = True
    """Whether an episode whose last answer ran into its length limit counts as truncated."""

    @abstractmethod
    async def act(self, base_url: str, api_key: str, task: Task) -> Any:
        """Do the task. The result is passed to `reward`."""

    @abstractmethod
    def reward(self, task: Task, output: Any) -> float | Score | Awaitable[float | Score]:
        """Score what `act` returned."""

    def more_metrics(self, output: Any) -> Mapping[str, float]:
        """Metrics of the rollout beside `turns` and `rows`, from what `act` returned."""
        return {}

    async def rollout(self, task: Task, inference: InferenceInterface, context: EpisodeContext) -> Rollout:
        if context.gateway is None:
            raise RuntimeError("this agent speaks to the model over HTTP, and no gateway is open here")
        async with context.gateway.session(inference, self.generation_args(task), name=self.model) as session:
            output = await self.act(session.base_url, session.api_key, task)
        turns = session.turns
        if not turns:
            raise ValueError(f"the agent never asked the model at its base_url {session.base_url}")
        async with scoring():
            score = as_score(await awaited(self.reward(task, output)))
        was_cut = self.length_is_truncation and turns[-1].stop_reason is StopReason.LENGTH
        samples = session.samples()
        return Rollout(
            samples=samples,
            reward=score.reward,
            status=Status.TRUNCATED if was_cut else Status.OK,
            reward_parts=score.parts,
            metrics={**self.more_metrics(output), "turns": len(turns), "rows": len(samples)},
            conversation=session.conversation,
        )


@dataclass(kw_only=True)
class OpenAIAgent(EndpointAgent, RowTasks):
    """An EndpointAgent made of functions, by `openai_agent`."""

    function: AgentFunction
    reward_function: RewardFunction

    async def act(self, base_url: str, api_key: str, task: Task) -> Any:
        return await call_user_function(self.function, base_url, api_key, task)

    def reward(self, task: Task, output: Any) -> float | Score | Awaitable[float | Score]:
        return self.reward_function(task, output)


def openai_agent(*, tasks: Rows, reward: RewardFunction, model: str = "policy") -> Callable[[F], F]:
    """Decorate a function as an agent; name it in the configuration as `path/to/file.py:function`. It can still be called."""

    def attach(function: F) -> F:
        def make(*, name: str, seed: int = 0) -> OpenAIAgent:
            return OpenAIAgent(name=name, seed=seed, rows=tasks, function=function, reward_function=reward, model=model)

        setattr(function, MAKE_AGENT, make)
        return function

    return attach
