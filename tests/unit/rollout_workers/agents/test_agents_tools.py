"""Episodes with tools: Python functions become JSON schemas, and whatever a model does wrong is answered to the model."""

import asyncio
import json
import string
import threading
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Annotated, Any

import pytest
from pydantic import Field

from async_rl.errors import ConfigError
from async_rl.protocols import EpisodeContext
from async_rl.testing import ScriptedInference
from async_rl.tokenization.tokenizers import Characters
from async_rl.types import Message, Rollout, Status, Task, Ticket, Tool, ToolCall
from rollout_workers.agents import ToolAgent
from rollout_workers.agents.tools import McpServer, ToolError
from rollout_workers.agents.tools.toolbox import AnyTools, open_toolbox
from rollout_workers.chat.tool_calls import write
from rollout_workers.environments.calculator import Calculator, calculate

CONTEXT = EpisodeContext(ticket=Ticket(id="t0", task_index=0, version=0, attempt=1), sibling=0, seed=0)
TOKENIZER = Characters(string.printable)


def add(a: int, b: Annotated[int, Field(description="the second one")] = 1) -> int:
    """Adds two numbers."""
    return a + b


async def shout(words: list[str]) -> dict[str, str]:
    return {"said": " ".join(words).upper()}


def divide(a: int, b: int) -> float:
    return a / b


async def sleep() -> None:
    await asyncio.Event().wait()


async def answers(tools: Sequence[AnyTools], *calls: ToolCall, timeout_s: float = 10.0) -> list[str]:
    async with open_toolbox(tools, timeout_s=timeout_s) as toolbox:
        return [await toolbox.answer(call) for call in calls]


def call(name: str, **arguments: object) -> ToolCall:
    return ToolCall(name=name, arguments=json.dumps(arguments))


# -- functions --------------------------------------------------------------------------------------------------------
async def test_a_signature_becomes_a_schema():
    async with open_toolbox([add], timeout_s=1) as toolbox:
        (tool,) = toolbox.tools
    assert (tool.name, tool.description) == ("add", "Adds two numbers.")
    assert tool.parameters == {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer", "default": 1, "description": "the second one"}},
        "required": ["a"],
        "additionalProperties": False,
    }


async def test_plain_and_async_functions_are_called_and_answer_text():
    assert await answers([add, shout], call("add", a=2), call("add", a="2", b=3), call("shout", words=["a", "b"])) == [
        "3",
        "5",
        '{"said": "A B"}',
    ]


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def more(self, by: int) -> int:
        self.count += by
        return self.count


async def test_a_method_is_a_tool_as_well():
    assert await answers([Counter().more], call("more", by=2), call("more", by=3)) == ["2", "5"]


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (call("subtract"), "error: there is no tool 'subtract'; there are add, divide, sleep"),
        (ToolCall(name="add", arguments="{a: 1"), "error: the arguments are not JSON"),
        (ToolCall(name="add", arguments="[" * 100_000), "error: the arguments are not JSON"),
        (ToolCall(name="add", arguments="[1]"), "error: the arguments must be a JSON object"),
        (call("add"), "error: a: Missing required argument"),
        (call("add", a="x"), "error: a: Input should be a valid integer"),
        (call("add", a=1, c=2), "error: c: Unexpected keyword argument"),
        (call("divide", a=1, b=0), "error: ZeroDivisionError: division by zero"),
        (call("sleep"), "error: no result within 0.05 s"),
    ],
)
async def test_what_a_model_does_wrong_it_is_told(made: ToolCall, told: str):
    limit = 0.05 if made.name == "sleep" else 10.0
    (answer,) = await answers([add, divide, sleep], made, timeout_s=limit)
    assert answer.startswith(told)


async def test_a_plain_function_that_hangs_holds_up_nobody():
    released = threading.Event()

    def hang() -> None:
        released.wait()

    async with open_toolbox([hang, add], timeout_s=2) as toolbox, asyncio.TaskGroup() as tasks:
        hung = tasks.create_task(toolbox.answer(call("hang")))
        assert await toolbox.answer(call("add", a=1)) == "2"
    assert hung.result() == "error: no result within 2 s"
    released.set()


async def test_two_tools_of_one_name_and_unclear_signatures_are_refused():
    with pytest.raises(ConfigError, match="two tools are called 'add'"):
        await answers([add, add])

    def anything(*numbers: int, **names: int) -> None: ...

    with pytest.raises(ConfigError, match="'anything' has a signature without a JSON schema"):
        await answers([anything])


@pytest.mark.parametrize("given", [{}, {"command": ["a"], "url": "http://b"}])
def test_an_mcp_server_is_named_in_one_way(given: dict[str, Any]):
    with pytest.raises(ConfigError, match="by its command or by its url"):
        McpServer(**given)


# -- episodes ---------------------------------------------------------------------------------------------------------
class Sums(ToolAgent):
    """Worth 1 where the last answer names the sum."""

    offered: Sequence[AnyTools] = (add, divide)

    def task(self, index: int) -> Task:
        return self.new_task(index, f"{index}+4?", answer=str(index + 4))

    def tools(self) -> Sequence[AnyTools]:
        return self.offered

    def reward(self, task: Task, response: str) -> float:
        return float(task.answer in response)


async def play(agent: ToolAgent, *said: str) -> tuple[Rollout, ScriptedInference]:
    left = iter(said)
    inference = ScriptedInference(lambda text: next(left), tokenizer=TOKENIZER, context_tokens=10_000)
    async with agent:
        return await agent.rollout(agent.task(3), inference, CONTEXT), inference


async def test_calls_are_answered_until_an_answer_makes_none():
    calls = (call("add", a=3, b=4), call("divide", a=1, b=0))
    rollout, inference = await play(Sums(name="sums"), "well " + write(calls), "it is 7")
    assert (rollout.reward, rollout.status, rollout.metrics["turns"]) == (1, Status.OK, 2)
    asked, called, first, second, said = rollout.conversation
    assert asked == Message(role="user", content="3+4?")
    assert (called.content, [made.name for made in called.tool_calls]) == ("well", ["add", "divide"])
    assert first == Message(role="tool", content="7", tool_call_id="call_0")
    assert second == Message(role="tool", content="error: ZeroDivisionError: division by zero", tool_call_id="call_1")
    assert said.content == "it is 7"

    tokenizer, (sample,) = inference.tokenizer, rollout.samples
    async with open_toolbox([add, divide], timeout_s=1) as toolbox:
        prompt = tokenizer.render([asked], toolbox.tools)
    said_ids = [*tokenizer.encode("well " + write(calls)), tokenizer.end_id]
    told = tokenizer.render_reply(first, second, after_end=True)
    last = [*tokenizer.encode("it is 7"), tokenizer.end_id]
    assert inference.prompts == [prompt, [*prompt, *said_ids, *told]]
    assert sample.token_ids.tolist() == [*prompt, *said_ids, *told, *last]
    assert sample.loss_mask.tolist() == [0] * len(prompt) + [1] * len(said_ids) + [0] * len(told) + [1] * len(last)


async def test_calls_beyond_the_limit_are_refused():
    one = write([call("add", a=1)])
    rollout, _ = await play(Sums(name="sums", max_calls=2), one * 3, one, "7")
    told = [message.content for message in rollout.conversation if message.role == "tool"]
    assert told == ["2", "2", *["error: no more than 2 calls may be made"] * 2]
    assert rollout.reward == 1


class Lamp:
    """A source of tools that is opened and closed."""

    def __init__(self) -> None:
        self.life: list[str] = []
        self.tools = [Tool(name="toggle")]

    @asynccontextmanager
    async def open(self) -> AsyncGenerator["Lamp"]:
        self.life.append("opened")
        yield self
        self.life.append("closed")

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        if not arguments:
            raise ToolError("on or off?")
        if arguments == {"break": True}:
            raise ConnectionError("the wire broke")
        return "done"


async def test_a_source_is_opened_once_for_all_episodes_and_closed_after_them():
    agent, lamp = Sums(name="sums"), Lamp()
    agent.offered = [add, lamp]
    rollout, _ = await play(agent, write([call("toggle"), call("toggle", on=True)]), "7")
    assert [message.content for message in rollout.conversation if message.role == "tool"] == ["error: on or off?", "done"]
    assert lamp.life == ["opened", "closed"]


async def test_a_source_that_broke_fails_the_episode():
    agent = Sums(name="sums")
    agent.offered = [Lamp()]
    with pytest.raises(ConnectionError, match="the wire broke"):
        await play(agent, write([call("toggle", **{"break": True})]))


async def test_an_agent_that_was_not_opened_says_so():
    agent = Sums(name="sums")
    with pytest.raises(RuntimeError, match="Sums holds tools: open it first"):
        await agent.rollout(agent.task(0), ScriptedInference(lambda text: "1"), CONTEXT)


# -- the calculator ---------------------------------------------------------------------------------------------------
async def test_a_row_is_answered_with_the_calculator():
    said = iter([write([call("calculate", expression="(7 + 5) * 3.5")]), "So it is #### 42"])
    gsm8k = {"prompt": "question", "answer_after": "####", "scoring": "number", "shuffle": False}
    agent = Calculator(name="calculator", path="configs/train/word_problems.jsonl", **gsm8k)
    task = replace(agent.task(0), answer="42")
    async with agent:
        rollout = await agent.rollout(
            task, ScriptedInference(lambda _: next(said), tokenizer=TOKENIZER, context_tokens=10_000), CONTEXT
        )
    assert [message.content for message in rollout.conversation if message.role == "tool"] == ["42"]
    assert rollout.reward == 1


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("-3 + 2 * 4", "5"),
        ("7 // 2 + 7 % 4", "6"),
        ("1 / 3", "0.333333333333"),
        ("1 / 0", "division by zero"),
        ("2 ** 9", "only numbers, + - * / // % and parentheses"),
        ("__import__('os').getcwd()", "only numbers"),
        ("True + 1", "only numbers"),
        ("9" * 30, "larger than 1e+15"),
        ("1 +", "not an arithmetic expression"),
        ("1" + "+1" * 200, "more than 200 characters"),
    ],
)
async def test_the_calculator_computes_and_nothing_else(expression: str, result: str):
    (answer,) = await answers([calculate], call("calculate", expression=expression))
    assert result in answer
