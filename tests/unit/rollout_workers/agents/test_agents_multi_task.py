"""Several agents as one: who gets which task, under which name, and how many at once."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any, Self

import pytest

from async_rl.config.rollout import EnvironmentConfig
from async_rl.errors import ConfigError
from async_rl.protocols import EpisodeContext, GroupAgent, InferenceInterface
from async_rl.testing import EchoAgent, ScriptedInference
from async_rl.types import Rollout, Status, Task, Ticket
from rollout_workers.agents import MultiTaskMember, WeightedMultiTask, multi_task
from rollout_workers.environments.nim import NimSelfPlay
from rollout_workers.registry import build_agent

TICKET = Ticket(id="t0", task_index=0, version=0, attempt=1)
CONTEXTS = [EpisodeContext(ticket=TICKET, sibling=sibling, seed=0) for sibling in range(2)]
ECHO = ScriptedInference(lambda text: text)


def echo(name: str, **about: Any) -> MultiTaskMember:
    return MultiTaskMember(name=name, agent=EchoAgent(name=name), **about)


def test_tasks_are_dealt_out_by_weight_and_each_member_sees_its_own_stream():
    mixed = multi_task([echo("a", weight=3), echo("b")], name="mix")
    tasks = [mixed.task(index) for index in range(5040 * 2)]
    assert Counter(task.environment for task in tasks[:8]) == {"mix.a": 6, "mix.b": 2}
    assert Counter(task.environment for task in tasks) == {"mix.a": 7560, "mix.b": 2520}
    for name in ("a", "b"):
        seen = [task.prompt for task in tasks if task.environment == f"mix.{name}"]
        assert seen == [str(index) for index in range(len(seen))]


def test_members_for_evaluation_pose_tasks_only_there():
    members = [echo("a"), echo("held", evaluation_only=True)]

    def names(mixed: WeightedMultiTask) -> set[str]:
        return {mixed.task(index).environment for index in range(10)}

    assert names(multi_task(members, name="mix")) == {"mix.a"}
    assert names(multi_task(members, name="mix", for_evaluation=True)) == {"mix.a", "mix.held"}
    with pytest.raises(ConfigError, match="'mix' has no environment to train on"):
        multi_task(members[1:], name="mix")
    with pytest.raises(ConfigError, match="same name"):
        multi_task([echo("a"), echo("a")], name="mix")


class Busy:
    """Notes how many of its episodes are being played, and whether it is open."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self.life: list[str] = []

    async def __aenter__(self) -> Self:
        self.life.append("opened")
        return self

    async def __aexit__(self, *_: object) -> None:
        self.life.append("closed")

    def task(self, index: int) -> Task:
        return Task(key=str(index), environment="busy", prompt="1")

    async def rollout(self, task: Task, inference: InferenceInterface, context: EpisodeContext) -> Rollout:
        assert task.environment == "busy"
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0)
        self.now -= 1
        return Rollout(samples=(), reward=1.0, status=Status.MASKED)


async def test_a_limit_holds_for_its_member_alone():
    limited, free = Busy(), Busy()
    mixed = multi_task(
        [MultiTaskMember(name="busy", agent=limited, max_in_flight=2), MultiTaskMember(name="free", agent=free)], name="mix"
    )
    async with mixed, asyncio.TaskGroup() as episodes:
        for index in range(20):
            task = mixed.task(index)
            if task.environment == "mix.busy":
                episodes.create_task(mixed.rollout(task, ECHO, CONTEXTS[0]))
    assert (limited.most, limited.life) == (2, ["opened", "closed"])


async def test_the_members_play_and_are_told_their_own_name():
    mixed = multi_task([echo("a"), echo("b")], name="mix")
    rollout = await mixed.rollout(mixed.task(1), ECHO, CONTEXTS[0])
    assert rollout.reward == 1
    assert not isinstance(mixed, GroupAgent)


async def test_groups_are_played_together_by_the_members_that_want_it():
    mixed = multi_task([echo("a"), MultiTaskMember(name="nim", agent=NimSelfPlay(name="nim"))], name="mix")
    assert isinstance(mixed, GroupAgent)

    async def played(index: int, answer: str) -> Sequence[float]:
        inference = ScriptedInference(lambda text: answer)
        return [rollout.reward for rollout in await mixed.rollout_group(mixed.task(index), inference, CONTEXTS)]

    by_name = {mixed.task(index).environment: index for index in (1, 0)}
    assert await played(by_name["mix.nim"], "9") == [-1, 0]
    assert await played(by_name["mix.a"], "0") == [1, 1]


def test_it_can_be_written_in_the_configuration():
    written = [{"type": "counting", "weight": 3}, {"type": "counting", "name": "long", "args": {"length": 30}}]
    agent = build_agent(EnvironmentConfig(type="multi_task", args={"environments": written}), seed=0)
    assert [agent.task(index).environment for index in range(4)].count("multi_task.counting") == 3
    assert max(len(agent.task(index).answer) for index in range(4)) == 30


@pytest.mark.parametrize(
    ("written", "sentence"),
    [
        ({"type": "counting", "wait": 3}, "an environment of 'multi_task' is written wrongly: wait"),
        ({"type": "countings"}, "did you mean 'counting'"),
    ],
)
def test_mistakes_in_it_are_one_sentence(written: dict[str, Any], sentence: str):
    with pytest.raises(ConfigError, match=sentence):
        build_agent(EnvironmentConfig(type="multi_task", args={"environments": [written]}), seed=0)
