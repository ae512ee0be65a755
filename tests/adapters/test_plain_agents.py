"""Functions as agents, TRL's reward functions, environments that are stepped: all that needs no library."""

import json
import threading
import urllib.request
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from async_rl.config.rollout import GatewayConfig
from async_rl.errors import ConfigError
from async_rl.protocols import Agent
from async_rl.testing import ScriptedInference
from async_rl.types import Message, Rollout, Status, Task
from rollout_workers import Client, agent_of, function_agent, openai_agent, trl_rewards
from rollout_workers.adapters.import_optional import import_optional
from rollout_workers.adapters.stepped import NoAction, SteppedAgent, WorldStep
from rollout_workers.episodes.episode import play
from rollout_workers.episodes.rewards import RewardFailed
from rollout_workers.gateway import open_gateway
from tests.adapters.adapter_stage import contexts


def in_turn(*answers: str) -> ScriptedInference:
    left = iter(answers)
    return ScriptedInference(lambda text: next(left))


async def played(agent: Agent, inference: ScriptedInference, index: int = 0) -> Rollout:
    """With a gateway, as in a worker."""
    async with open_gateway(GatewayConfig(), context_tokens=512, run_token="run") as gateway:
        [context] = contexts(1, gateway)
        return await play(agent.rollout, agent.task(index), inference, context, timeout_s=30)


# -- functions ---------------------------------------------------------------------------------------------------------
async def test_the_example_of_a_function_is_played(example):
    async with example("function_agent") as stage:
        task, rollouts = await stage.play(siblings=4)
        assert task.prompt == "0+0="
        assert {rollout.reward for rollout in rollouts} <= {0.0, 0.5, 1.0}
        for rollout in rollouts:
            [row] = rollout.samples
            assert row.num_sampled == rollout.metrics["turns"]
        inference = in_turn("7", "0")
        second_try = await stage.agent.rollout(task, inference, contexts(1)[0])
        assert second_try.reward == 0.5
        assert inference.tokenizer.decode(second_try.samples[0].token_ids.tolist()) == "0+0=7no=0"


@function_agent(tasks=["a="], reward=lambda task, output: len(output))
async def two_conversations(task: Task, client: Client) -> str:
    return await client.ask(task.prompt) + await client.another().ask((Message(role="user", content="b="),))


@pytest.mark.parametrize(("limit", "status"), [({}, Status.TRUNCATED), ({"max_tokens": 1}, Status.OK)])
async def test_only_a_limit_that_the_function_did_not_set_cuts(limit: dict, status: Status):
    @function_agent(tasks=["a="])
    async def brief(task: Task, client: Client) -> float:
        await client.ask(task.prompt, **limit)
        return 1.0

    endless = ScriptedInference(lambda text: "z" * 20, context_tokens=8)
    assert (await played(agent_of(brief, name="brief"), endless)).status is status


async def test_each_conversation_of_a_function_is_a_row():
    rollout = await played(agent_of(two_conversations, name="two"), in_turn("xyz", "z"))
    assert rollout.reward == 4
    assert [row.num_sampled for row in rollout.samples] == [4, 2], "with their end tokens"


@function_agent(tasks=["a="])
async def shy(task: Task, client: Client) -> float:
    return 1.0


@function_agent(tasks=["a="])
async def talks(task: Task, client: Client) -> str:
    return await client.ask(task.prompt)


@pytest.mark.parametrize(
    ("make", "boundary", "sentence"),
    [(shy, "environment", "never asked the model"), (talks, "reward", "finite number, got 'x'")],
)
async def test_what_a_function_may_do_wrong(make, boundary: str, sentence: str):
    rollout = await played(agent_of(make, name="wrong"), in_turn("x"))
    assert rollout.failure is not None
    assert rollout.failure.boundary == boundary
    assert sentence in rollout.failure.message


# -- agents with a base_url ------------------------------------------------------------------------------------------
@openai_agent(
    tasks=lambda index: {"prompt": f"{index}=", "answer": index}, reward=lambda task, said: float(said == task.answer)
)
def blocking(base_url: str, api_key: str, task: Task) -> str:
    """Without any SDK, on a thread."""
    assert threading.current_thread() is not threading.main_thread()
    body = json.dumps({"model": "policy", "prompt": task.prompt}).encode()
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{base_url}/completions", body, headers)) as answer:
        return json.load(answer)["choices"][0]["text"]


@pytest.mark.parametrize(("said", "reward"), [("41", 1.0), ("40", 0.0)])
async def test_a_blocking_agent_is_scored_for_its_output(said: str, reward: float):
    rollout = await played(agent_of(blocking, name="blocking"), in_turn(said), index=41)
    assert (rollout.reward, rollout.status) == (reward, Status.OK), rollout.failure
    assert [row.num_sampled for row in rollout.samples] == [3]


async def test_without_a_gateway_an_agent_says_what_is_missing():
    agent = agent_of(blocking, name="blocking")
    rollout = await play(agent.rollout, agent.task(0), in_turn(), contexts(1)[0], timeout_s=30)
    assert rollout.failure is not None
    assert "no gateway is open" in rollout.failure.message


# -- TRL -------------------------------------------------------------------------------------------------------------
async def test_the_example_of_trl_s_rewards_is_played(example):
    async with example("trl_rewards") as stage:
        _, rollouts = await stage.play(siblings=4)
        for rollout in rollouts:
            parts = rollout.reward_parts
            assert rollout.reward == parts["correct"] + 0.1 * parts["concise"]


async def test_trl_s_functions_see_what_trl_would_show_them():
    seen: dict = {}

    def remember(prompts, completions, completion_ids, levels, **columns):
        seen.update(prompts=prompts, completions=completions, completion_ids=completion_ids, levels=levels, columns=columns)
        return [None, 2.0, 3.0]

    async def one(completions, **columns):
        return [1.0] * len(completions)

    prompt = [{"role": "user", "content": "hi"}]
    rows = [{"prompt": prompt, "levels": [1, 2], "source": "here"}]
    agent = trl_rewards(remember, one, dataset=rows, weights=[10, 1])(name="trl")
    rollouts = await agent.rollout_group(agent.task(0), in_turn("a", "b", "c"), contexts(3))
    assert [rollout.reward for rollout in rollouts] == [1.0, 21.0, 31.0]
    assert rollouts[0].reward_parts == {"one": 1.0}
    assert seen["prompts"] == [prompt] * 3
    assert seen["completions"] == [[{"role": "assistant", "content": text}] for text in "abc"]
    assert seen["levels"] == [[1, 2]] * 3
    assert seen["columns"] == {"source": ["here"] * 3}
    assert [len(ids) for ids in seen["completion_ids"]] == [2, 2, 2]


async def test_a_reward_function_that_counts_wrongly_is_named():
    def short(completions, **columns):
        return [1.0]

    agent = trl_rewards(short, dataset=["a="])(name="trl")
    rollout = await play(agent.rollout, agent.task(0), in_turn("x"), contexts(1)[0], timeout_s=30)
    assert rollout.failure is None, "one reward for one completion"
    with pytest.raises(RewardFailed) as caught:
        await agent.rollout_group(agent.task(0), in_turn("x", "y"), contexts(2))
    assert "short returned 1 rewards for 2 completions" in str(caught.value.__cause__)


# -- stepped environments ----------------------------------------------------------------------------------------------
@dataclass
class Stairs:
    steps: int = 0

    async def reset(self) -> str:
        return "go="

    async def step(self, said: str) -> WorldStep:
        if said != "up":
            raise NoAction("up=")
        self.steps += 1
        return WorldStep(told="on=", reward=1.0, is_over=self.steps == 3)


@dataclass(kw_only=True)
class Climb(SteppedAgent):
    @asynccontextmanager
    async def world(self, task: Task):
        yield Stairs()


@pytest.mark.parametrize(
    ("said", "changed", "reward", "status", "text"),
    [
        (["up", "up", "up"], {}, 3.0, Status.OK, "go=upon=upon=up"),
        (["up", "no", "up", "up"], {"no_action_reward": -0.5}, 2.5, Status.OK, "go=upon=noup=upon=up"),
        (["up", "up"], {"max_turns": 2}, 2.0, Status.TRUNCATED, "go=upon=up"),
    ],
)
async def test_a_world_is_stepped_until_it_ends(said, changed, reward: float, status: Status, text: str):
    inference = in_turn(*said)
    rollout = await played(Climb(name="climb", chat=False, **changed), inference)
    assert (rollout.reward, rollout.status) == (reward, status)
    assert inference.tokenizer.decode(rollout.samples[0].token_ids.tolist()) == text


async def test_a_full_context_ends_the_climb():
    inference = ScriptedInference(lambda text: "up", context_tokens=9)
    rollout = await played(Climb(name="climb", chat=False), inference)
    assert (rollout.reward, rollout.status) == (1.0, Status.TRUNCATED)


# -- mistakes ----------------------------------------------------------------------------------------------------------
def test_mistakes_are_one_sentence():
    with pytest.raises(ConfigError, match="environment 'none' has no tasks"):
        agent_of(function_agent(tasks=[])(lambda task, client: None), name="none")
    with pytest.raises(ConfigError, match="2 reward functions and 1 weights"):
        trl_rewards(len, sum, dataset=["a="], weights=[1.0])(name="trl")
    with pytest.raises(ConfigError, match=r"'no_such_library' is not installed here: pip install 'async-rl\[envs\]'"):
        import_optional("no_such_library.part", install="async-rl[envs]")
    with pytest.raises(ValueError, match="prompt must be a text or a list of messages, got 3"):
        trl_rewards(len, dataset=[{"prompt": 3}])(name="trl").task(0)
