"""ServedModels behind OpenAI's protocol: what kind of backend a server makes, and what becomes of its moods."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from async_rl.config.evaluation import OpenAIPolicy, PolicySampling
from async_rl.config.tokenizer import CharacterTokenizer
from async_rl.errors import ConfigError
from async_rl.protocols import ContextOverflow, EpisodeContext
from async_rl.tokenization.tokenizers import Characters
from async_rl.types import Message, Status, StopReason, Ticket, Tool, ToolCall
from rollout_workers.environments.counting import Counting
from rollout_workers.inference.evaluation_inference import EvaluationInference
from rollout_workers.inference.openai.backend import OpenAIText, open_openai
from rollout_workers.inference.openai.retrying_client import RetryBudget, ServerUnavailable
from tests.unit.rollout_workers.inference.openai_servers import (
    JsonObject,
    chat_choice,
    error,
    never,
    serving,
    text_choice,
    token_server,
)

DIGITS = CharacterTokenizer(alphabet="0123456789=")
END = Characters.end_id
CONTEXT = EpisodeContext(ticket=Ticket(id="t", task_index=0, version=0, attempt=1), sibling=0, seed=0)


@asynccontextmanager
async def backend(url: str, **settings: Any) -> AsyncIterator[OpenAIText]:
    async with open_openai(OpenAIPolicy(url=url, **settings)) as inference:
        yield inference


async def test_a_server_that_returns_ids_gives_tokens_but_nothing_to_train_on() -> None:
    async with serving(completions=token_server(END)) as (url, asked), backend(url, tokenizer=DIGITS) as inference:
        completion = await inference.generate("3=", max_tokens=8, temperature=0.5, top_k=4)
        assert inference.returns == "tokens"
        assert asked[-1]["prompt"] == inference.tokenizer.render("3=")
        assert {name: asked[-1][name] for name in ("model", "max_tokens", "temperature", "top_k")} == {
            "model": "served",
            "max_tokens": 8,
            "temperature": 0.5,
            "top_k": 4,
        }
        assert completion.token_ids.tolist() == [7, 7, 7, END]
        assert completion.logprobs.tolist() == [-0.25] * 4
        assert completion.stop_reason is StopReason.END
        agent = Counting(name="counting", length=3)
        with pytest.raises(ValueError, match="can be evaluated, not trained on"):
            await agent.rollout(agent.task(0), inference, CONTEXT)
        rollout = await agent.rollout(agent.task(0), EvaluationInference(inference), CONTEXT)
        assert rollout.status is Status.OK
        assert rollout.num_sampled == 3


async def test_a_server_of_text_is_given_text_and_can_be_evaluated() -> None:
    def complete(body: JsonObject) -> JsonObject | web.Response:
        return text_choice("456") if isinstance(body["prompt"], str) else error(400, "prompt must be text")

    async with serving(completions=complete) as (url, asked), backend(url, tokenizer=DIGITS) as inference:
        agent = Counting(name="counting", length=3)
        task = agent.task(0)
        with pytest.raises(ValueError, match="token ids"):
            await agent.rollout(task, inference, CONTEXT)
        rollout = await agent.rollout(task, EvaluationInference(inference), CONTEXT)
        assert rollout.conversation[-1].content == "456"
        assert asked[-1]["prompt"] == task.prompt
        assert inference.returns == "text"
        with pytest.raises(ValueError, match="top_k is not offered by the server at http"):
            await inference.generate("3=", top_k=3)


async def test_messages_tools_and_answers_reach_a_chat_server_as_they_were_said() -> None:
    def chat(body: JsonObject) -> JsonObject:
        if len(body["messages"]) == 2:
            call = {"id": "x9", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
            return chat_choice(None, tool_calls=[call])
        return chat_choice("so 2")

    async with serving(chat=chat) as (url, asked), backend(url) as inference:
        tokenizer = inference.tokenizer
        prompt = [Message(role="system", content="You add."), Message(role="user", content="1+1?")]
        row = tokenizer.render(prompt, [Tool(name="add", description="adds", parameters={"type": "object"})])
        first = await inference.generate(row)
        assert first.text == '\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
        row += first.token_ids.tolist()
        row += tokenizer.render_reply(Message(role="tool", content="2", tool_call_id="mine"), after_end=True)
        second = await inference.generate(row)
        row += [*second.token_ids.tolist(), *tokenizer.encode("and 2+2?")]
        await inference.generate(row)
    assert second.text == "so 2"
    assert asked[0]["tools"][0]["function"]["name"] == "add"
    said = asked[-1]["messages"]
    assert [message["role"] for message in said] == ["system", "user", "assistant", "tool", "assistant", "user"]
    assert said[2]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert said[2]["tool_calls"][0]["id"] == said[3]["tool_call_id"]
    assert said[4:] == [{"role": "assistant", "content": "so 2"}, {"role": "user", "content": "and 2+2?"}]


async def test_a_busy_server_is_asked_again_and_told_how_the_episode_samples() -> None:
    moods = iter([error(429, "later", **{"Retry-After": "0.01"}), error(503, "no"), chat_choice("4"), chat_choice("5")])
    async with serving(chat=lambda _: next(moods)) as (url, asked):
        sampling = PolicySampling(temperature=0.3, max_tokens=5)
        async with backend(url, model="mine", sampling=sampling) as inference:
            assert (await inference.generate("3=")).text == "4"
            assert (await inference.generate("3=", temperature=0)).text == "5"
    assert [body["temperature"] for body in asked] == [0.3, 0.3, 0.3, 0]
    assert {body["max_tokens"] for body in asked} == {5}
    assert {body["model"] for body in asked} == {"mine"}


async def test_a_server_that_stays_busy_is_given_up() -> None:
    async with serving(chat=lambda _: error(503, "no")) as (url, asked), backend(url, attempts=3) as inference:
        with pytest.raises(ServerUnavailable, match=r"answered 503, at the last of 3 attempts"):
            await inference.generate("3=")
    assert len(asked) == 3


async def test_a_deadline_covers_all_attempts() -> None:
    async with serving(chat=never) as (url, _), backend(url, timeout_s=0.2) as inference:
        with pytest.raises(TimeoutError, match=r"gave no answer within 0.2 s"):
            await inference.generate("3=")


def test_retries_are_earned() -> None:
    budget = RetryBudget(earned=0.5, most=2)
    assert [budget.spend() for _ in range(3)] == [True, True, False]
    for _ in range(10):
        budget.succeeded()
    assert [budget.spend() for _ in range(3)] == [True, True, False]


async def test_a_prompt_that_is_too_long_is_told_from_other_refusals() -> None:
    refusals = iter([error(400, "too long", "context_length_exceeded"), error(400, "what?", "bad_request")])
    async with serving(chat=lambda _: next(refusals)) as (url, _), backend(url) as inference:
        with pytest.raises(ContextOverflow, match="too long for the model served"):
            await inference.agenerate("3=")
        with pytest.raises(Exception, match="it answered 400: what"):
            await inference.generate("3=")


async def test_several_at_once_differ_by_their_seed() -> None:
    async with serving(chat=lambda body: chat_choice(str(body["seed"]))) as (url, _), backend(url) as inference:
        completions = await inference.agenerate("3=", n=3, seed=5)
    assert sorted(completion.text for completion in completions) == ["5", "6", "7"]


async def test_a_thread_that_cannot_wait_gets_its_answer_too() -> None:
    async with serving(chat=lambda _: chat_choice("4")) as (url, _), backend(url) as inference:
        completion = await asyncio.to_thread(inference.generate_blocking, "3=", temperature=0)
        assert completion.text == "4"
        with pytest.raises(RuntimeError, match="use `await generate"):
            inference.generate_blocking("3=")


async def test_a_keyword_that_does_not_exist_is_refused_by_name() -> None:
    async with serving(chat=lambda _: chat_choice("4")) as (url, asked), backend(url) as inference:
        with pytest.raises(TypeError, match=r"no generation argument 'topk'; did you mean top_k\?"):
            await inference.generate("3=", topk=3)  # pyright: ignore[reportCallIssue]
    assert not asked


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"url": "http://127.0.0.1:9/v1", "attempts": 1}, "cannot be used"),
        ({"api_key_file": Path("/nowhere/key")}, "api_key_file: /nowhere/key cannot be read"),
    ],
    ids=["nobody listens", "no key"],
)
async def test_what_cannot_be_opened_is_one_sentence(settings: dict[str, Any], sentence: str) -> None:
    async with serving(chat=never) as (url, _):
        with pytest.raises(ConfigError, match=sentence):
            async with backend(**({"url": url} | settings)):
                pass


async def test_the_key_is_read_from_its_file(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret\n")
    key = tmp_path / "key"
    async with serving(chat=lambda _: chat_choice("4")) as (url, asked), backend(url, api_key_file=key) as inference:
        await inference.generate("3=")
    assert asked[0]["key"] == "Bearer secret"


def test_calls_of_a_conversation_survive_the_way_through_ids() -> None:
    from rollout_workers.inference.transcript import Transcript, read

    transcript = Transcript()
    calls = [ToolCall(name="f", arguments="{}"), ToolCall(name="g", arguments='{"x": [1, "é"]}')]
    row = [
        *transcript.render("péché"),
        *transcript.answer("", calls),
        *transcript.render_reply(Message(role="tool", content="1"), Message(role="tool", content="2"), after_end=True),
        *transcript.answer(""),
    ]
    user, called, first, second, last = read(row).messages
    assert user == {"role": "user", "content": "péché"}
    assert [call["function"]["name"] for call in called["tool_calls"]] == ["f", "g"]
    assert [call["id"] for call in called["tool_calls"]] == [first["tool_call_id"], second["tool_call_id"]]
    assert last == {"role": "assistant", "content": ""}
