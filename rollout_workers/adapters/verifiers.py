"""Environments of verifiers (its v1 interface): its taskset, harness and rewards, with our model behind the gateway."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from async_rl.errors import ConfigError
from async_rl.types import Message, Task
from rollout_workers.adapters.endpoint import EndpointAgent
from rollout_workers.adapters.import_optional import import_optional
from rollout_workers.episodes.rewards import Score

HARNESS = "async_rl_direct"
"""Id of our harness in verifiers."""

DEFAULTS = {"agent": {"harness": {"id": HARNESS}, "runtime": {"type": "subprocess"}}}


@dataclass(kw_only=True)
class Verifiers(EndpointAgent):
    taskset: str
    """Id of an installed taskset: the name of its module."""
    environment: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The rest of verifiers' [env] block, such as {taskset: {split: train}, agent: {harness: {id: bash}}}."""
    size: int = 10_000
    """Maximum number of its tasks; they repeat after the last."""

    def __post_init__(self) -> None:
        self._library = import_optional("verifiers.v1", install="verifiers>=0.4,<0.5")
        sys.modules[HARNESS] = importlib.import_module("rollout_workers.adapters.verifiers_harness")
        block = merged(merged(DEFAULTS, self.environment), {"taskset": {"id": self.taskset}})
        try:
            self._config = self._library.resolve_env_config(block)
            self._tasks: Sequence[Any] = list(islice(self._library.load_environment(self._config).taskset, self.size))
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            raise ConfigError(f"environment {self.name!r}: verifiers cannot load {self.taskset!r}: {error}") from error
        if not self._tasks:
            raise ConfigError(f"environment {self.name!r}: the taskset {self.taskset!r} is empty")

    @property
    def num_tasks(self) -> int:
        return len(self._tasks)

    def task(self, index: int) -> Task:
        place = index % len(self._tasks)
        return self.new_task(place, _messages_of(self._tasks[place].data), place=place)

    async def act(self, base_url: str, api_key: str, task: Task) -> Any:
        """Run one episode and return its trace, in an environment of its own: a shared one keeps a client per base_url."""
        # The key of the episode is part of base_url; verifiers would read one from an environment variable.
        client = self._library.EvalClientConfig(base_url=base_url, api_key_var="ASYNC_RL_NO_KEY")
        environment = self._library.load_environment(self._config)
        async with environment.serving():
            episode = await environment.run_episode(
                self._tasks[int(task.data["place"])], self._library.ModelContext(model=self.model, client=client)
            )
        problems = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if problems:
            raise RuntimeError(f"verifiers: {problems[0].type}: {problems[0].message}")
        if len(episode.traces) != 1:
            raise ValueError(f"{self.taskset} plays {len(episode.traces)} agents in an episode; only one can be trained")
        return episode.traces[0]

    def reward(self, task: Task, output: Any) -> Score:
        parts = {name: float(reward.score) for name, reward in output.rewards.items() if reward is not None}
        return Score(reward=float(output.reward), parts=parts)

    def more_metrics(self, output: Any) -> dict[str, float]:
        return {name: float(value) for name, value in output.metrics.items() if value is not None}


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two nested mappings: sections are merged, values of `above` win."""
    both = {name: merged(below[name], above[name]) for name in below.keys() & above.keys() if isinstance(above[name], Mapping)}
    return {**below, **above, **both}


def _messages_of(data: Any) -> tuple[Message, ...]:
    """The prompt as messages, for people to read."""
    system = [Message(role="system", content=data.system_prompt)] if data.system_prompt else []
    if data.prompt is None or isinstance(data.prompt, str):
        return (*system, Message(role="user", content=data.prompt if data.prompt is not None else ""))
    return (*system, *(Message(role=message.role, content=str(message.content)) for message in data.prompt))
