"""What docs/agents.md shows is what happens."""

import re
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from async_rl.config.rollout import EnvironmentConfig
from async_rl.protocols import Agent, EpisodeContext, GroupAgent
from async_rl.testing import ScriptedInference
from async_rl.tokenization.tokenizers import Characters
from async_rl.types import Rollout, Ticket, ToolCall
from rollout_workers.agents import ToolAgent
from rollout_workers.chat.tool_calls import write
from rollout_workers.registry import build_agent
from tests.support.repository import ROOT

PAGE = (ROOT / "docs" / "agents.md").read_text()
TICKET = Ticket(id="t0", task_index=0, version=0, attempt=1)


def shown(language: str, mark: str) -> str:
    """The block that holds a mark."""
    (block,) = (block for block in re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL) if mark in block)
    return block


def names(mark: str) -> Mapping[str, Any]:
    """What a block defines; a second block about tools goes on from the first."""
    defined: dict[str, Any] = {}
    for block in ["class Products", mark] if mark == "class Browsing" else [mark]:
        exec(shown("python", block), defined)
    return defined


def one_after_another(*answers: str) -> ScriptedInference:
    left = iter(answers)
    return ScriptedInference(lambda text: next(left))


async def group(agent: Agent, inference: ScriptedInference, siblings: int = 2, index: int = 1) -> list[Rollout]:
    contexts = [EpisodeContext(ticket=TICKET, sibling=sibling, seed=0) for sibling in range(siblings)]
    task = agent.task(index)
    if isinstance(agent, GroupAgent):
        return list(await agent.rollout_group(task, inference, contexts))
    return [await agent.rollout(task, inference, context) for context in contexts]


async def test_the_reward_that_compares():
    agent = names("ShortestRight")["ShortestRight"](name="shortest")
    rollouts = await group(agent, one_after_another("it is 2", "2", "3"), siblings=3)
    assert [rollout.reward for rollout in rollouts] == [1, 2, 0]


async def test_the_pairs():
    defined = names("class Hinted")
    best = await group(defined["Sums"](name="sums", candidates=2), one_after_another("3", "2"))
    hinted = await group(defined["Hinted"](name="hinted"), one_after_another("2", "3"))
    for rollouts in (best, hinted):
        assert [(rollout.reward, rollout.metrics["chosen"]) for rollout in rollouts] == [(1, 1), (0, 0)]
    assert [rollout.conversation[0].content for rollout in hinted] == ["count on 1+1=", "guess 1+1="]


async def test_the_game():
    defined = names("HigherDigit")
    together = await group(defined["WithItself"](name="digits"), one_after_another("7", "4"))
    assert [rollout.reward for rollout in together] == [1, -1]
    against = await group(defined["AgainstAnother"](name="digits"), one_after_another("7", "4", "7", "4"))
    assert [rollout.reward for rollout in against] == [1, -1]


async def test_the_tools():
    agent: ToolAgent = names("class Products")["Products"](name="products")
    answers = iter([write([ToolCall(name="multiply", arguments='{"a": 3, "b": 17}')]), "51"])
    inference = ScriptedInference(lambda text: next(answers), tokenizer=Characters(string.printable), context_tokens=4096)
    async with agent:
        rollout = await agent.rollout(agent.task(3), inference, EpisodeContext(ticket=TICKET, sibling=0, seed=0))
        assert agent.toolbox.tools[0].parameters["properties"]["b"]["description"] == "how many times"
    assert rollout.reward == 1
    assert rollout.conversation[2].content == "51"
    assert len(names("class Browsing")["Browsing"](name="browsing").tools()) == 3


PROBLEMS = """{"question": "1+1=", "answer": 2, "level": 1}
{"question": "2+2=", "answer": 4, "level": 0}
"""


async def test_the_dataset_and_its_curriculum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("problems.jsonl").write_text(PROBLEMS)
    Path("stages.py").write_text(shown("python", "easy_first"))
    (section,) = yaml.safe_load(shown("yaml", "problems.jsonl"))["environments"]
    staged = {**section, "args": section["args"] | {"curriculum": "stages.py:easy_first"}}
    assert {build(section).task(index).answer for index in range(2)} == {"2", "4"}
    assert {build(staged).task(index).prompt for index in range(1000)} == {"1+1="}
    assert (await group(build(staged), ScriptedInference(lambda text: "2")))[0].reward == 1


def build(section: Mapping[str, Any]) -> Agent:
    return build_agent(EnvironmentConfig.model_validate(section), seed=0)


def test_several_as_one():
    (section,) = yaml.safe_load(shown("yaml", "multi_task"))["environments"]
    held = {**section, "args": section["args"] | {"for_evaluation": True}}
    assert {build(section).task(index).environment for index in range(9)} == {"warm_up.counting", "warm_up.even_digits"}
    assert "warm_up.guess_number" in {build(held).task(index).environment for index in range(9)}


async def test_pass_at_k(capsys: pytest.CaptureFixture[str]):
    await names("how_good")["how_good"](ScriptedInference(lambda text: "5"))
    assert "pass@4 0.000 [0.000, " in capsys.readouterr().out
