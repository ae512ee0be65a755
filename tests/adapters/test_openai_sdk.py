"""Unmodified clients of OpenAI's SDKs against the gateway: what they say and hear is what the rows hold."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from async_rl.config.rollout import GatewayConfig
from async_rl.testing import ScriptedInference
from async_rl.tokenization.tokenizers import HuggingFace
from async_rl.types import ToolCall
from rollout_workers.chat.tool_calls import write
from rollout_workers.gateway import open_gateway
from rollout_workers.gateway.session import EpisodeSession
from tests.support.small_tokenizer import make_tokenizer

openai = pytest.importorskip("openai", reason="the openai SDK is not installed: make test-adapters")

CALL = write([ToolCall(name="add", arguments='{"a": 1, "b": 2}')])
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HuggingFace:
    return HuggingFace(make_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def calls_once(text: str) -> str:
    return "the sum is 3" if "tool_response" in text else f"let me see\n{CALL}"


@asynccontextmanager
async def episode(tokenizer: HuggingFace) -> AsyncIterator[tuple[EpisodeSession, "openai.AsyncOpenAI"]]:
    inference = ScriptedInference(calls_once, tokenizer=tokenizer, context_tokens=4096)
    async with (
        open_gateway(GatewayConfig(), context_tokens=4096, run_token="run") as gateway,
        gateway.session(inference) as session,
        openai.AsyncOpenAI(base_url=session.base_url, api_key="whatever", max_retries=0) as client,
    ):
        yield session, client


@pytest.mark.parametrize("stream", [False, True])
async def test_chat_with_tools_is_one_row(tokenizer: HuggingFace, stream: bool):
    messages: list[dict] = [{"role": "user", "content": "1+2?"}]
    async with episode(tokenizer) as (session, client):
        for _ in range(2):
            answered = await client.chat.completions.create(model="gpt", messages=messages, tools=[ADD], stream=stream)
            if stream:
                answer = {"role": "assistant", "content": "", "tool_calls": []}
                async for chunk in answered:
                    delta = chunk.choices[0].delta
                    answer["content"] += delta.content or ""
                    answer["tool_calls"] += [call.model_dump(exclude={"index"}) for call in delta.tool_calls or []]
            else:
                answer = answered.choices[0].message.model_dump(include={"role", "content", "tool_calls"})
            messages.append({name: value for name, value in answer.items() if value})
            for call in answer["tool_calls"] or []:
                assert json.loads(call["function"]["arguments"]) == {"a": 1, "b": 2}
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": "3"})
        assert messages[-1] == {"role": "assistant", "content": "the sum is 3"}
        [row] = session.samples()
        assert row.num_sampled == sum(len(turn.token_ids) for turn in session.turns)
        assert [message.role for message in session.conversation] == ["user", "assistant", "tool", "assistant"]


@pytest.mark.parametrize("stream", [False, True])
async def test_responses_with_tools_are_one_row(tokenizer: HuggingFace, stream: bool):
    items: list = [{"role": "user", "content": "1+2?"}]
    tool = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}
    async with episode(tokenizer) as (session, client):
        for _ in range(2):
            answered = await client.responses.create(model="gpt", input=items, tools=[tool], stream=stream, instructions="add")
            if stream:
                events = [event async for event in answered]
                assert [event.sequence_number for event in events] == list(range(len(events)))
                answered = events[-1].response
            items += [item.model_dump(exclude_none=True) for item in answered.output]
            items += [
                {"type": "function_call_output", "call_id": item.call_id, "output": "3"}
                for item in answered.output
                if item.type == "function_call"
            ]
        assert answered.output_text == "the sum is 3"
        [row] = session.samples()
        assert row.num_sampled == sum(len(turn.token_ids) for turn in session.turns)


async def test_responses_go_on_from_an_id(tokenizer: HuggingFace):
    async with episode(tokenizer) as (session, client):
        first = await client.responses.create(model="gpt", input="hello")
        second = await client.responses.create(model="gpt", input="go on", previous_response_id=first.id)
        assert second.previous_response_id == first.id
        assert len(session.samples()) == 1


async def test_completions_and_models(tokenizer: HuggingFace):
    async with episode(tokenizer) as (session, client):
        first = await client.completions.create(model="gpt", prompt="begin", logprobs=1)
        text = "begin" + first.choices[0].text
        await client.completions.create(model="gpt", prompt=f"{text} tool_response", max_tokens=5)
        assert len(session.samples()) == 1
        assert [model.id async for model in client.models.list()] == ["policy"]


async def test_errors_arrive_as_the_sdk_s_own(tokenizer: HuggingFace):
    async with episode(tokenizer) as (session, client):
        with pytest.raises(openai.BadRequestError) as long:
            await client.completions.create(model="gpt", prompt="a" * 10_000)
        assert long.value.code == "context_length_exceeded"
        async with openai.AsyncOpenAI(base_url=f"{session.base_url.partition('/s/')[0]}/v1", api_key="wrong") as stranger:
            with pytest.raises(openai.AuthenticationError, match="episode's key"):
                await stranger.models.list()


async def test_the_key_alone_opens_the_endpoint(tokenizer: HuggingFace):
    async with episode(tokenizer) as (session, _):
        base_url = f"{session.base_url.partition('/s/')[0]}/v1"
        async with openai.AsyncOpenAI(base_url=base_url, api_key=session.api_key) as client:
            await client.chat.completions.create(model="gpt", messages=[{"role": "user", "content": "hi"}])
        assert len(session.turns) == 1


@pytest.mark.parametrize("api", ["chat_completions", "responses"])
@pytest.mark.parametrize("stream", [False, True])
async def test_openai_agents_play_one_row(tokenizer: HuggingFace, api: str, stream: bool):
    agents = pytest.importorskip("agents", reason="openai-agents is not installed: make test-adapters")
    agents.set_tracing_disabled(True)

    @agents.function_tool
    def add(a: int, b: int) -> int:
        """Add."""
        return a + b

    async with episode(tokenizer) as (session, client):
        kind = agents.OpenAIChatCompletionsModel if api == "chat_completions" else agents.OpenAIResponsesModel
        agent = agents.Agent(name="adder", instructions="add", tools=[add], model=kind(model="gpt", openai_client=client))
        if stream:
            result = agents.Runner.run_streamed(agent, "1+2?")
            async for _ in result.stream_events():
                pass
        else:
            result = await agents.Runner.run(agent, "1+2?")
        assert result.final_output == "the sum is 3"
        assert len(session.turns) == 2
        assert len(session.samples()) == 1
        assert session.forks == 0


async def test_a_blocking_client_may_live_on_a_thread(tokenizer: HuggingFace):
    async with episode(tokenizer) as (session, _):

        def talk() -> str:
            with openai.OpenAI(base_url=session.base_url, api_key=session.api_key) as client:
                return client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}]).model

        assert await asyncio.to_thread(talk) == "m"
