"""An async function as the agent: it gets the task and a client of the model.

@function_agent(tasks=[("2+3=", "5"), ("4+4=", "8")])
async def add(task: Task, client: Client) -> float:
    return float(await client.ask(task.prompt) == task.answer)

environments: [{type: my_agent.py:add}]
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from async_rl.protocols import EpisodeContext, GenerationArgs, InferenceInterface
from async_rl.types import Rollout, Status, StopReason, Task
from rollout_workers.adapters.task_rows import RewardFunction, Rows, RowTasks
from rollout_workers.agents.dialogue import Dialogue, Observation
from rollout_workers.episodes.rewards import as_score
from rollout_workers.episodes.stage_timeouts import scoring
from rollout_workers.registry import MAKE_AGENT
from rollout_workers.user_functions import awaited

AgentFunction = Callable[[Task, "Client"], Awaitable[Any]]
F = TypeVar("F", bound=AgentFunction)


@dataclass(slots=True)
class EpisodeRecord:
    """What was said in an episode so far."""

    dialogues: list[Dialogue] = field(default_factory=list[Dialogue])
    is_cut: bool = False
    """Whether the last answer ran into a limit that the function did not set itself."""


class Client:
    """The model, for one episode. What it samples is recorded as tokens; the function sees text."""

    def __init__(self, inference: InferenceInterface, record: EpisodeRecord) -> None:
        self._inference = inference
        self._record = record
        self._dialogue = Dialogue(inference)
        record.dialogues.append(self._dialogue)

    async def ask(self, observation: Observation, **args: Any) -> str:
        """Ask the model: first with a prompt, later with an observation. `args` are fields of GenerationArgs.

        Raises ContextOverflow when there is no room for an answer.
        """
        self._dialogue.observe(observation)
        completion = await self._dialogue.generate(GenerationArgs(**args))
        self._record.is_cut = completion.stop_reason is StopReason.LENGTH and "max_tokens" not in args
        return completion.text

    def another(self) -> Client:
        """Return a client for a second conversation of the episode: another token row with the same reward."""
        return Client(self._inference, self._record)


@dataclass(kw_only=True)
class FunctionAgent(RowTasks):
    function: AgentFunction
    reward: RewardFunction | None = None
    """Scores a task and what the function returned; without it the function returns the reward."""

    async def rollout(self, task: Task, inference: InferenceInterface, context: EpisodeContext) -> Rollout:
        record = EpisodeRecord()
        output = await self.function(task, Client(inference, record))
        dialogues = [dialogue for dialogue in record.dialogues if dialogue.num_turns]
        if not dialogues:
            raise ValueError("the function never asked the model, so there is nothing to train on")
        async with scoring():
            score = as_score(output if self.reward is None else await awaited(self.reward(task, output)))
        return Rollout(
            samples=tuple(sample for dialogue in dialogues for sample in dialogue.samples),
            reward=score.reward,
            status=Status.TRUNCATED if record.is_cut else Status.OK,
            reward_parts=score.parts,
            metrics={"turns": sum(dialogue.num_turns for dialogue in dialogues)},
            conversation=max((dialogue.conversation for dialogue in dialogues), key=len),
        )


def function_agent(*, tasks: Rows, reward: RewardFunction | None = None) -> Callable[[F], F]:
    """Decorate a function as an agent; name it in the configuration as `path/to/file.py:function`. It can still be called."""

    def attach(function: F) -> F:
        def make(*, name: str, seed: int = 0) -> FunctionAgent:
            return FunctionAgent(name=name, seed=seed, rows=tasks, function=function, reward=reward)

        setattr(function, MAKE_AGENT, make)
        return function

    return attach
