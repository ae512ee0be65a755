"""The gateway over real sockets: what agents may ask, what they are told when it cannot be, and what the rows hold."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from aiohttp import ClientSession

from async_rl.config.rollout import GatewayConfig
from async_rl.errors import ConfigError, ServiceStopped
from async_rl.protocols import GenerationArgs, Prompt
from async_rl.testing import ScriptedInference
from async_rl.tokenization.tokenizers import HuggingFace
from async_rl.types import Completion, StopReason, ToolCall, spans_of
from rollout_workers.chat.tool_calls import write
from rollout_workers.gateway import open_gateway
from rollout_workers.gateway.session import EpisodeSession
from rollout_workers.inference.generation import resolve
from tests.support.small_tokenizer import make_tokenizer

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CONTEXT = 512


class Recorded(ScriptedInference):
    """Remembers how it was asked to sample."""

    def __init__(self, answer: Callable[[str], Any], tokenizer: HuggingFace) -> None:
        super().__init__(answer, tokenizer=tokenizer, context_tokens=CONTEXT)
        self.asked: list[GenerationArgs | None] = []

    async def generate(self, prompt: Prompt, args: GenerationArgs | None = None) -> Completion:
        self.asked.append(args)
        return await super().generate(prompt, args)


@dataclass(frozen=True, kw_only=True)
class Episode:
    session: EpisodeSession
    inference: Recorded
    http: ClientSession

    async def post(self, path: str, body: Any, **options: Any) -> tuple[int, Any]:
        async with self.http.post(self.session.base_url + path, json=body, **options) as response:
            return response.status, await response.json()

    async def chat(self, *contents: str | dict[str, Any], **more: Any) -> dict[str, Any]:
        """Contents take turns between user and assistant; whole messages stand for themselves."""
        messages = [
            said if isinstance(said, dict) else {"role": ("user", "assistant")[turn % 2], "content": said}
            for turn, said in enumerate(contents)
        ]
        status, body = await self.post("/chat/completions", {"messages": messages, **more})
        assert status == 200, body
        return body

    @property
    def gateway_url(self) -> str:
        return self.session.base_url.partition("/s/")[0]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HuggingFace:
    return HuggingFace(make_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@asynccontextmanager
async def episode(
    tokenizer: HuggingFace,
    answer: Callable[[str], Any] = lambda text: "fine",
    args: GenerationArgs | None = None,
    **config: Any,
) -> AsyncIterator[Episode]:
    inference = Recorded(answer, tokenizer)
    async with (
        open_gateway(GatewayConfig(**config), context_tokens=CONTEXT, run_token="run-token") as gateway,
        gateway.session(inference, args) as session,
        ClientSession() as http,
    ):
        yield Episode(session=session, inference=inference, http=http)


def said(body: dict[str, Any]) -> str:
    return body["choices"][0]["message"]["content"]


async def test_a_chat_that_goes_on_is_one_row_of_what_was_sampled(tokenizer: HuggingFace):
    async with episode(tokenizer, lambda text: f"seen {text.count('user')}") as playing:
        first = await playing.chat("a", return_token_ids=True)
        second = await playing.chat("a", said(first), "b", return_token_ids=True)
        [row] = playing.session.samples()
        assert said(second) == "seen 2"
        assert row.token_ids.tolist() == second["prompt_token_ids"] + second["choices"][0]["token_ids"]
        assert row.token_ids.tolist()[: len(first["prompt_token_ids"])] == first["prompt_token_ids"]
        assert [len(turn.token_ids) for turn in playing.session.turns] == [
            len(body["choices"][0]["token_ids"]) for body in (first, second)
        ]
        assert second["usage"]["prompt_tokens"] == len(second["prompt_token_ids"])
        assert second["choices"][0]["versions"] == [{"version": 0, "start": 0, "stop": second["usage"]["completion_tokens"]}]
        assert playing.inference.prompts[1] == second["prompt_token_ids"]
        assert playing.session.forks == 0


async def test_text_that_tokenizes_otherwise_is_not_tokenized_again(tokenizer: HuggingFace):
    """The scripted model spells its words letter by letter, which the tokenizer never would."""

    class Spelling(ScriptedInference):
        async def generate(self, prompt: Prompt, args: GenerationArgs | None = None) -> Completion:
            self.prompts.append([token for token in prompt if isinstance(token, int)])
            token_ids = [*(token for letter in "search" for token in tokenizer.encode(letter)), tokenizer.end_id]
            whole = await super().generate(prompt, args)
            return replace(
                whole,
                token_ids=np.array(token_ids, np.int32),
                logprobs=np.zeros(len(token_ids), np.float32),
                versions=spans_of([0] * len(token_ids)),
            )

    assert len(tokenizer.encode("search")) < len("search")
    inference = Spelling(lambda text: "search", tokenizer=tokenizer)
    async with (
        open_gateway(GatewayConfig(), context_tokens=CONTEXT, run_token="") as gateway,
        gateway.session(inference) as session,
        ClientSession(base_url=session.base_url + "/") as http,
    ):
        messages = [{"role": "user", "content": "a"}]
        for _ in range(3):
            async with http.post("chat/completions", json={"messages": messages}) as response:
                messages += [(await response.json())["choices"][0]["message"], {"role": "user", "content": "more"}]
        text = "once search"
        for _ in range(2):
            async with http.post("completions", json={"prompt": text}) as response:
                text += (await response.json())["choices"][0]["text"] + " again search"
        talk, prose = session.samples()
    assert talk.num_sampled == 3 * (len("search") + 1)
    assert prose.num_sampled == 2 * (len("search") + 1)


async def test_replayed_messages_match_whatever_an_sdk_made_of_them(tokenizer: HuggingFace):
    call = write([ToolCall(name="add", arguments='{"a": 1, "b": [2]}')])
    async with episode(tokenizer, lambda text: "3" if "tool_response" in text else f" \n{call}") as playing:
        first = await playing.chat("1+2", tools=[ADD])
        [choice] = first["choices"]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] is None
        [made] = choice["message"]["tool_calls"]
        replayed = {
            "role": "assistant",
            "content": "",
            "name": "somebody",
            "tool_calls": [{"id": made["id"], "function": {"name": "add", "arguments": '{"b":[2],"a":1}'}}],
        }
        result = {"role": "tool", "tool_call_id": made["id"], "content": [{"type": "text", "text": "3"}]}
        assert said(await playing.chat("1+2", replayed, result, tools=[ADD])) == "3"
        assert len(playing.session.samples()) == 1
        assert [message.role for message in playing.session.conversation] == ["user", "assistant", "tool", "assistant"]


@pytest.mark.parametrize(
    "history",
    [
        ["A", "fine", "b"],
        ["a", "FINE", "b"],
        [{"role": "system", "content": "be brief"}, {"role": "user", "content": "a"}],
    ],
    ids=["another question", "another answer", "a system prompt"],
)
async def test_an_edited_history_forks_a_row_of_its_own(tokenizer: HuggingFace, history: list[Any]):
    async with episode(tokenizer) as playing:
        await playing.chat("a")
        await playing.chat("a", "fine", "b")
        await playing.chat(*history)
        assert playing.session.forks == 1
        assert len(playing.session.samples()) == 2


async def test_a_system_prompt_in_the_middle_stands_where_the_template_puts_it(tokenizer: HuggingFace):
    """Rendered from scratch, and still no fork: this template only appends, so the tokens go on from the answer."""
    async with episode(tokenizer) as playing:
        await playing.chat("a")
        await playing.chat("a", "fine", {"role": "system", "content": "now be brief"}, {"role": "user", "content": "b"})
        assert playing.session.forks == 0
        [row] = playing.session.samples()
        assert "now be brief" in tokenizer.decode(row.token_ids.tolist())


async def test_other_tools_fork_and_tool_choice_none_does_not(tokenizer: HuggingFace):
    call = write([ToolCall(name="add", arguments="{}")])
    async with episode(tokenizer, lambda text: call) as playing:
        unparsed = await playing.chat("a", tools=[ADD], tool_choice="none")
        assert unparsed["choices"][0]["finish_reason"] == "stop"
        await playing.chat("a", said(unparsed), "b", tools=[ADD])
        assert playing.session.forks == 0
        await playing.chat("a", said(unparsed), "b")
        assert playing.session.forks == 1


async def test_several_choices_are_siblings(tokenizer: HuggingFace):
    answers = iter(["one", "two", "three", "four"])
    async with episode(tokenizer, lambda text: next(answers)) as playing:
        body = await playing.chat("a", n=3, seed=7)
        texts = [choice["message"]["content"] for choice in body["choices"]]
        assert sorted(texts) == ["one", "three", "two"]
        assert {args.seed for args in playing.inference.asked if args is not None} == {7, 8, 9}
        await playing.chat("a", "two", "b")
        assert playing.session.forks == 0
        rows = playing.session.samples()
        assert len(rows) == 3
        assert sum(row.num_sampled for row in rows) == sum(len(turn.token_ids) for turn in playing.session.turns)


async def test_tokens_in_and_out(tokenizer: HuggingFace):
    root = {"token_ids": tokenizer.render("begin"), "sampling_params": {"logprobs": 1, "stop_token_ids": [0], "max_tokens": 9}}
    async with episode(tokenizer) as playing:
        url = playing.session.base_url.removesuffix("/v1") + "/inference/v1/generate"
        async with playing.http.post(url, json=root) as response:
            [choice] = (await response.json())["choices"]
        assert [entry["token"] for entry in choice["logprobs"]["content"]] == [
            f"token_id:{token}" for token in choice["token_ids"]
        ]
        assert {entry["logprob"] for entry in choice["logprobs"]["content"]} == {-0.5}
        assert playing.inference.asked == [GenerationArgs(max_tokens=9, stop_token_ids=(0,))]
        longer = {"token_ids": [*root["token_ids"], *choice["token_ids"], 7], "sampling_params": {}}
        async with playing.http.post(url, json=longer) as response:
            assert response.status == 200
        assert len(playing.session.samples()) == 1


async def test_what_a_request_asks_lies_over_the_session_and_the_run_may_overrule_it(tokenizer: HuggingFace):
    ours = GenerationArgs(max_tokens=8, temperature=0.5)
    wish = {"temperature": 0, "top_p": 0.5, "top_k": -1, "stop": "x", "seed": 3, "max_completion_tokens": 4, "max_tokens": 9}
    async with episode(tokenizer, args=ours) as playing:
        await playing.chat("a", **wish)
        assert playing.inference.asked == [GenerationArgs(max_tokens=4, temperature=0, top_p=0.5, top_k=0, stop=("x",), seed=3)]
    async with episode(tokenizer, args=ours, override_sampling=True) as playing:
        await playing.chat("a", **wish)
        assert playing.inference.asked == [GenerationArgs(max_tokens=4, temperature=0.5, stop=("x",))]


async def test_stop_strings_are_not_shown_and_stay_in_the_row(tokenizer: HuggingFace):
    async with episode(tokenizer, lambda text: "go on!") as playing:
        body = await playing.chat("a", stop=["!"], return_token_ids=True)
        assert said(body) == "go on"
        assert tokenizer.decode(body["choices"][0]["token_ids"]) == "go on!"
        await playing.chat("a", "go on", "b", stop=["!"])
        assert len(playing.session.samples()) == 1


async def test_tokenize_and_models(tokenizer: HuggingFace):
    async with episode(tokenizer) as playing:
        messages = [{"role": "user", "content": "a"}]
        _, counted = await playing.post("/tokenize", {"messages": messages})
        asked = await playing.chat("a", return_token_ids=True)
        assert counted["tokens"] == asked["prompt_token_ids"]
        assert counted["max_model_len"] == CONTEXT
        _, text = await playing.post("/detokenize", {"tokens": tokenizer.encode("hello")})
        assert text == {"prompt": "hello"}
        async with playing.http.get(playing.session.base_url + "/models") as response:
            [card] = (await response.json())["data"]
        assert (card["id"], card["max_model_len"]) == ("policy", CONTEXT)


USER = {"role": "user", "content": "a"}


def chat_with(**more: Any) -> dict[str, Any]:
    return {"messages": [USER], **more}


CALLS_NOTHING = {"role": "assistant", "content": "a", "tool_calls": [{"function": {}}]}


@pytest.mark.parametrize(
    ("body", "param", "sentence"),
    [
        ({}, "messages", "messages is missing"),
        ({"messages": []}, "messages", "messages must not be empty"),
        ({"messages": "a"}, "messages", "messages must be a list, not 'a'"),
        ({"messages": [{"content": "a"}]}, "messages[0].role", "messages[0].role is missing"),
        (
            {"messages": [USER, {"role": "wizard"}]},
            "messages[1].role",
            "messages[1].role must be 'system', 'developer', 'user'",
        ),
        ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content", "messages[0].content must be text, not 7"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content",
            "messages[0].content cannot be used: a content part of type 'image_url' cannot be read: only text can",
        ),
        ({"messages": [CALLS_NOTHING]}, "messages[0].tool_calls[0].function.name", "is missing"),
        (chat_with(temperature="hot"), "temperature", "temperature must be a number, not 'hot'"),
        (chat_with(temperature=-1), "temperature", "temperature=-1 must be 0 (greedy) or more"),
        (chat_with(max_tokens=1.5), "max_tokens", "max_tokens must be a whole number, not 1.5"),
        (chat_with(stop=7), "stop", "stop must be text, not 7"),
        (chat_with(stream="perhaps"), "stream", "stream must be true or false, not 'perhaps'"),
        (chat_with(top_k=10**30), "top_k", "top_k must be "),
        (chat_with(seed=-1), "seed", "seed must be at least 0, not -1"),
        (chat_with(stop_token_ids=[-1]), "stop_token_ids[0]", "stop_token_ids[0] must be at least 0, not -1"),
        (chat_with(n=0), "n", "n must be at least 1, not 0"),
        (chat_with(n=65), "n", "n=65 exceeds the 64 generations"),
        (chat_with(presence_penalty=0.5), "presence_penalty", "presence_penalty is not offered here: leave it out"),
        (chat_with(logprobs=True, top_logprobs=3), "top_logprobs", "log-probabilities of their sampled tokens alone"),
        (chat_with(response_format={"type": "json_object"}), "response_format.type", "response_format.type must be 'text'"),
        (chat_with(tools=[ADD], tool_choice="required"), "tool_choice", "tool_choice 'required' cannot be enforced"),
        ([], None, "the body must be an object, not []"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
async def test_a_wrong_request_is_one_sentence_that_names_the_parameter(
    tokenizer: HuggingFace, body: Any, param: str | None, sentence: str
):
    async with episode(tokenizer, engine_checks) as playing:
        status, answer = await playing.post("/chat/completions", body)
        assert status == 400
        assert sentence in answer["error"]["message"]
        assert answer["error"]["type"] == "invalid_request_error"
        assert answer["error"]["param"] == param
        assert set(answer["error"]) == {"message", "type", "param", "code"}
        assert playing.session.samples() == ()


def engine_checks(text: str) -> str:
    """Refuses as the engine does."""
    resolve(GenerationArgs(temperature=-1), prompt_length=1, context_tokens=CONTEXT)
    return "never"


async def test_what_the_other_endpoints_do_not_offer_is_named_as_well(tokenizer: HuggingFace):
    asked = [
        ("/completions", {"prompt": "a", "logprobs": 2}, "logprobs"),
        ("/completions", {"prompt": [1, "x"]}, "prompt[1]"),
        ("/responses", {"input": [{"type": "message", "role": "user", "content": 7}]}, "input[0].content"),
        ("/responses", {"input": [{"type": "picture"}]}, "input[0]"),
        ("/responses", {"input": "a", "top_logprobs": 2}, "top_logprobs"),
        ("/responses", {"input": "a", "n": 2}, "n"),
        ("/responses", {"input": "a", "previous_response_id": "resp_0"}, "previous_response_id"),
    ]
    async with episode(tokenizer) as playing:
        for path, body, param in asked:
            status, answer = await playing.post(path, body)
            assert (status, answer["error"]["param"]) == (400, param), answer
        async with playing.http.post(playing.session.base_url + "/completions", data=b"{'prompt'") as response:
            broken = (await response.json())["error"]
        assert (broken["message"], broken["param"]) == ("the body of the request is not valid JSON", None)


class Cut(ScriptedInference):
    """Says so many tokens of a text, as a length limit would leave them."""

    def __init__(self, text: str, num_tokens: int, tokenizer: HuggingFace) -> None:
        super().__init__(lambda _: text, tokenizer=tokenizer, context_tokens=CONTEXT)
        self._num_tokens = num_tokens

    async def generate(self, prompt: Prompt, args: GenerationArgs | None = None) -> Completion:
        whole = await super().generate(prompt, args)
        kept = whole.token_ids[: self._num_tokens]
        return replace(
            whole,
            token_ids=kept,
            logprobs=whole.logprobs[: len(kept)],
            versions=spans_of([0] * len(kept)),
            stop_reason=StopReason.LENGTH,
            text=self.tokenizer.decode(kept.tolist()),
        )


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
async def test_no_character_comes_in_halves(tokenizer: HuggingFace, is_stream: bool):
    text = "aé€🙂z"
    token_ids = tokenizer.encode(text)
    assert len(token_ids) > len(text), "this tokenizer divides characters"
    for num_tokens in range(1, len(token_ids) + 1):
        async with (
            open_gateway(GatewayConfig(), context_tokens=CONTEXT, run_token="") as gateway,
            gateway.session(Cut(text, num_tokens, tokenizer)) as session,
            ClientSession() as http,
        ):
            body = chat_with(logprobs=True, stream=is_stream)
            async with http.post(session.base_url + "/chat/completions", json=body) as response:
                raw = await response.text()
        choices = [json.loads(line.removeprefix("data: "))["choices"][0] for line in raw.split("\n\n") if "choices" in line]
        spoken = "".join(each.get("delta", each.get("message"))["content"] for each in choices if "content" in str(each))
        entries = [entry for each in choices if each.get("logprobs") for entry in each["logprobs"]["content"]]
        assert text.startswith(spoken)
        assert len(spoken) == len(tokenizer.decode(token_ids[:num_tokens]).rstrip("\N{REPLACEMENT CHARACTER}"))
        assert len(entries) == num_tokens
        assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == spoken
        assert "".join(entry["token"] for entry in entries) == spoken


async def test_what_does_not_fit_is_told_apart(tokenizer: HuggingFace):
    async with episode(tokenizer, max_body_mb=0.01) as playing:
        status, long = await playing.post("/completions", {"prompt": "a" * CONTEXT * 2})
        assert (status, long["error"]["code"]) == (400, "context_length_exceeded")
        status, large = await playing.post("/completions", {"prompt": "a" * 20_000})
        assert status == 413
        assert "max_body_mb=0.01" in large["error"]["message"]
        status, elsewhere = await playing.post("/embeddings", {})
        assert (status, elsewhere["error"]["code"]) == (404, "unknown_url")
        async with playing.http.post(playing.session.base_url + "/completions", data=b"\xff{") as response:
            assert response.status == 400


async def test_keys_open_what_they_are_for(tokenizer: HuggingFace):
    async with episode(tokenizer) as playing:
        url, key = playing.gateway_url, playing.session.api_key

        async def get(path: str, bearer: str | None = None) -> tuple[int, str]:
            headers = {"Authorization": f"Bearer {bearer}"} if bearer is not None else {}
            async with playing.http.get(url + path, headers=headers) as response:
                return response.status, await response.text()

        assert (await get("/health"))[0] == 200
        assert (await get("/v1/models"))[0] == 401
        assert (await get("/v1/models", "run-token"))[0] == 401
        assert (await get("/v1/models", key))[0] == 200
        assert (await get("/s/guessed/v1/models", key))[0] == 404
        assert (await get("/metrics", key))[0] == 401
        await playing.chat("a")
        status, metrics = await get("/metrics", "run-token")
        assert status == 200
        assert "async_rl_gateway_sessions 1.0" in metrics
        assert f"async_rl_gateway_tokens {sum(len(turn.token_ids) for turn in playing.session.turns):.1f}" in metrics


async def test_an_episode_that_ends_takes_its_requests_along(tokenizer: HuggingFace):
    asked, never = asyncio.Event(), asyncio.Event()

    async def hang(text: str) -> str:
        asked.set()
        await never.wait()
        return ""

    inference = Recorded(hang, tokenizer)
    async with (
        open_gateway(GatewayConfig(), context_tokens=CONTEXT, run_token="") as gateway,
        ClientSession() as http,
        asyncio.TaskGroup() as tasks,
    ):
        async with gateway.session(inference) as session:
            playing = Episode(session=session, inference=inference, http=http)
            waiting = tasks.create_task(playing.post("/chat/completions", {"messages": [USER]}))
            await asked.wait()
        assert (await waiting)[0] == 410
        status, late = await playing.post("/chat/completions", {"messages": [USER]})
        assert status == 410
        assert "this episode is over" in late["error"]["message"]
        assert session.samples() == ()
        assert gateway.counters.generations == 0


async def test_a_client_that_leaves_ends_its_generation(tokenizer: HuggingFace):
    asked, ended = asyncio.Event(), asyncio.Event()

    async def hang(text: str) -> str:
        asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return ""

    async with episode(tokenizer, hang) as playing:
        leaving = asyncio.ensure_future(playing.post("/chat/completions", {"messages": [USER]}))
        await asked.wait()
        leaving.cancel()
        await ended.wait()
        assert playing.session.samples() == ()


async def test_one_episode_cannot_take_all_places(tokenizer: HuggingFace):
    asked, let_go = asyncio.Event(), asyncio.Event()

    async def wait(text: str) -> str:
        asked.set()
        await let_go.wait()
        return "fine"

    async with episode(tokenizer, wait, max_concurrent=2) as playing, asyncio.TaskGroup() as tasks:
        both = tasks.create_task(playing.chat("a", n=2))
        await asked.wait()
        status, busy = await playing.post("/chat/completions", {"messages": [USER]})
        assert status == 429
        assert "runs 2 generations already" in busy["error"]["message"]
        let_go.set()
        await both
        await playing.chat("a")


async def test_a_request_may_have_a_deadline(tokenizer: HuggingFace):
    async with episode(tokenizer, lambda text: asyncio.Event().wait(), request_timeout_s=0.01) as playing:
        status, late = await playing.post("/chat/completions", {"messages": [USER]})
        assert status == 503
        assert "request_timeout_s=0.01" in late["error"]["message"]


@pytest.mark.parametrize(
    ("error", "status"),
    [(ServiceStopped("the engine is closed"), 503), (ValueError("top_k is refused"), 400), (OSError("no"), 500)],
)
async def test_what_the_engine_raises_is_answered(tokenizer: HuggingFace, error: Exception, status: int):
    def raises(text: str) -> str:
        raise error

    async with episode(tokenizer, raises) as playing:
        found, answer = await playing.post("/chat/completions", {"messages": [USER]})
        assert found == status
        assert str(error) in answer["error"]["message"]


async def test_a_stream_is_the_answer_in_pieces(tokenizer: HuggingFace):
    async with episode(tokenizer) as playing:
        body = {"messages": [USER], "stream": True, "stream_options": {"include_usage": True}}
        async with playing.http.post(playing.session.base_url + "/chat/completions", json=body) as response:
            assert response.content_type == "text/event-stream"
            lines = [line.removeprefix("data: ") for line in (await response.text()).split("\n\n") if line]
        assert lines[-1] == "[DONE]"
        *chunks, counted = [json.loads(line) for line in lines[:-1]]
        assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "fine"
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
        assert counted["usage"]["completion_tokens"] == len(playing.session.turns[0].token_ids)


async def test_a_taken_port_is_one_sentence(tokenizer: HuggingFace):
    async with episode(tokenizer) as playing:
        port = int(playing.gateway_url.rpartition(":")[2])
        with pytest.raises(ConfigError, match=rf"worker\.gateway: cannot listen on 127\.0\.0\.1:{port}"):
            async with open_gateway(GatewayConfig(port=port), context_tokens=CONTEXT, run_token=""):
                pass


async def test_agents_elsewhere_get_an_address_that_they_reach():
    config = GatewayConfig(host="0.0.0.0", advertised_host="worker-3")
    async with open_gateway(config, context_tokens=CONTEXT, run_token="") as gateway:
        assert gateway.address.startswith("http://worker-3:")
