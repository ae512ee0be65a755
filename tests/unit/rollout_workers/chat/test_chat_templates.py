"""Conversations grow by tokens: what a template puts around replies follows the sampled ids, which stay as they are."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.protocols import Tokenizer
from async_rl.tokenization.tokenizers import Characters, HuggingFace
from async_rl.types import Completion, Message, StopReason, Tool, ToolCall, spans_of
from rollout_workers.chat.replies import reply_ids
from rollout_workers.chat.tool_calls import ToolCallFormat, parse, write
from tests.support.small_tokenizer import CHATML, HEADERS, THINKING, make_tokenizer

SEARCH = Tool(name="search", description="looks things up", parameters={"type": "object"})


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, HuggingFace]:
    templates = {"hermes": CHATML, "llama3_json": HEADERS, "thinking": THINKING}
    return {name: HuggingFace(make_tokenizer(tmp_path_factory.mktemp(name), template)) for name, template in templates.items()}


words = st.text(st.characters(codec="utf-8", categories=["L", "N", "P", "Zs"]), min_size=1, max_size=12).map(str.strip)
results = st.lists(words, min_size=1, max_size=2)
replies = st.lists(st.one_of(words, results), min_size=1, max_size=4)
"""What follows each answer: a user's words, or the results of as many calls."""


def conversation(replies: list[str | list[str]], format: ToolCallFormat) -> list[Message]:
    """An answer before each reply: calls before results, words before words."""
    messages = [Message(role="system", content="be brief"), Message(role="user", content="begin")]
    for turn, reply in enumerate(replies):
        if isinstance(reply, str):
            messages += [Message(role="assistant", content=f"said {turn}"), Message(role="user", content=reply)]
            continue
        kept = reply if format == "hermes" else reply[:1]  # Llama 3's templates take one call at a time
        calls = [
            ToolCall(name="search", arguments=json.dumps({"q": position}), id=f"c{turn}{position}")
            for position in range(len(kept))
        ]
        messages.append(Message(role="assistant", content="", tool_calls=tuple(calls)))
        messages += [Message(role="tool", content=said, tool_call_id=call.id) for said, call in zip(kept, calls, strict=True)]
    return messages


def sampled(message: Message, tokenizer: Tokenizer, format: ToolCallFormat, *, ends: bool) -> Completion:
    """The answer as a model would have written it."""
    calls = write(message.tool_calls, format)
    text = message.content + (f"\n{calls}" if calls and format == "hermes" else calls)
    token_ids = [*tokenizer.encode(text), *([tokenizer.end_id] if ends else [])]
    return Completion(
        token_ids=np.array(token_ids, np.int32),
        logprobs=np.zeros(len(token_ids), np.float32),
        versions=spans_of([0] * len(token_ids)),
        stop_reason=StopReason.END if ends else StopReason.LENGTH,
        text=text,
    )


@pytest.mark.parametrize("format", ["hermes", "llama3_json"])
@settings(max_examples=50)
@given(replies=replies, ends=st.lists(st.booleans(), min_size=4, max_size=4))
def test_a_row_grown_turn_by_turn_is_what_the_template_renders(
    tokenizers: dict[str, HuggingFace], format: ToolCallFormat, replies: list[str | list[str]], ends: list[bool]
):
    tokenizer = tokenizers[format]
    messages = conversation(replies, format)
    answers = [position for position, message in enumerate(messages) if message.role == "assistant"]
    row = tokenizer.render(messages[:2], [SEARCH])
    for turn, (position, end) in enumerate(zip(answers, [*answers[1:], len(messages)], strict=True)):
        answer = sampled(messages[position], tokenizer, format, ends=ends[turn])
        row += [*answer.token_ids.tolist(), *reply_ids(tokenizer, answer, *messages[position + 1 : end])]
    assert row == tokenizer.render(messages, [SEARCH])


def test_thoughts_that_a_template_drops_stay_in_the_row(tokenizers: dict[str, HuggingFace]):
    tokenizer = tokenizers["thinking"]
    asked, told = Message(role="user", content="2+2"), Message(role="user", content="sure?")
    thought = sampled(Message(role="assistant", content="hm\n</think>\n4"), tokenizer, "hermes", ends=True)
    reply = reply_ids(tokenizer, thought, told)
    assert tokenizer.decode(reply) == "\nuser\nsure?\nassistant\n<think>\n"
    again = tokenizer.render([asked, Message(role="assistant", content="hm\n</think>\n4"), told])
    assert [*tokenizer.render([asked]), *thought.token_ids.tolist(), *reply] != again
    assert tokenizer.decode(again).endswith("\nsure?\nassistant\n<think>\n")


def test_a_stop_token_that_closes_the_turn_stands_there_once():
    tokenizer = Characters("ab:user\n")
    answer = Completion(
        token_ids=np.array(tokenizer.encode("a\n"), np.int32),
        logprobs=np.zeros(2, np.float32),
        versions=spans_of([0, 0]),
        stop_reason=StopReason.STOP,
        text="a\n",
    )
    assert tokenizer.decode(reply_ids(tokenizer, answer, Message(role="user", content="b"))) == "user: b\n".replace(
        " ", "\N{REPLACEMENT CHARACTER}"
    )


def test_a_template_shows_tools_and_calls(tokenizers: dict[str, HuggingFace]):
    call = ToolCall(name="search", arguments='{"q":1}', id="c")
    text = tokenizers["hermes"].decode(
        tokenizers["hermes"].render([Message(role="assistant", content="", tool_calls=(call,))], [SEARCH])
    )
    assert '"description": "looks things up"' in text
    assert '{"name": "search", "arguments": {"q": 1}}' in text


def test_a_conversation_that_the_template_refuses_is_one_sentence(tmp_path: Path):
    template = "{{ raise_exception('roles must alternate') }}"
    tokenizer = HuggingFace(make_tokenizer(tmp_path, template))
    with pytest.raises(ValueError, match="cannot render this conversation: roles must alternate"):
        tokenizer.render([Message(role="user", content="a")])


def test_characters_write_tools_and_calls_as_text():
    tokenizer = Characters("".join(map(chr, range(32, 127))) + "\n")
    call = ToolCall(name="add", arguments='{"a": 1}')
    messages = [Message(role="assistant", content="so", tool_calls=(call,)), Message(role="tool", content="2")]
    assert tokenizer.decode(tokenizer.render(messages, [Tool(name="add")])) == (
        'tool add: {}\nassistant: so<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>\ntool: 2\n'
    )


# -- calls in text ----------------------------------------------------------------------------------------------------

names = st.from_regex(r"[a-z_][a-z0-9_.-]{0,10}", fullmatch=True)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner),
    max_leaves=5,
)
arguments = st.dictionaries(st.text(st.characters(codec="utf-8")), values, max_size=3)


@pytest.mark.parametrize("format", ["hermes", "llama3_json"])
@settings(max_examples=50)
@given(calls=st.lists(st.tuples(names, arguments), min_size=1, max_size=3))
def test_what_is_written_is_read_again(format: ToolCallFormat, calls: list[tuple[str, dict[str, object]]]):
    written = [ToolCall(name=name, arguments=json.dumps(value)) for name, value in calls]
    text = write(written, format)
    if format == "hermes" and text.count("<tool_call>") != len(calls):
        return  # an argument that holds a tag
    said, read = parse(text, format)
    assert said == ""
    assert [(call.name, json.loads(call.arguments)) for call in read] == calls


@settings(max_examples=50)
@given(
    text=st.text()
    | st.lists(
        st.sampled_from(["<tool_call>", "</tool_call>", '{"name": "a"', ', "arguments": {', "}", "; ", "NaN", "\\ud800", '"'])
    ).map("".join)
)
def test_reading_never_raises_and_loses_nothing_that_is_no_call(text: str):
    for format in ("hermes", "llama3_json"):
        said, calls = parse(text, format)
        assert calls or said == text
        assert all(
            json.dumps(call.name) and call.name.encode() and call.arguments.encode("utf-8", "surrogatepass") for call in calls
        )


@pytest.mark.parametrize(
    ("format", "text", "said", "found"),
    [
        ("hermes", 'so <tool_call>{"name": "a", "arguments": {"x": 1}}</tool_call> ok', "so  ok", [("a", '{"x": 1}')]),
        ("hermes", '<tool_call>{"name": "a"}', "", [("a", "{}")]),  # cut right behind it
        ("hermes", '<tool_call>{"name": "a", "arguments": "{\\"x\\": 1}"}</tool_call>', "", [("a", '{"x": 1}')]),
        ("hermes", '<tool_call>{"name": }</tool_call>', '<tool_call>{"name": }</tool_call>', []),
        ("hermes", '<tool_call>{"name": 3}</tool_call>', '<tool_call>{"name": 3}</tool_call>', []),
        ("hermes", "<tool_call>" + "[" * 100_000, "<tool_call>" + "[" * 100_000, []),
        ("llama3_json", '<|python_tag|>{"name": "a", "parameters": [1]}; {"name": "b"} so', "so", [("a", "[1]"), ("b", "{}")]),
        ("llama3_json", 'call {"name": "a"}', 'call {"name": "a"}', []),
        ("llama3_json", '{"answer": 42}', '{"answer": 42}', []),
    ],
)  # fmt: skip
def test_calls_as_models_write_them(format: ToolCallFormat, text: str, said: str, found: list[tuple[str, str]]):
    assert parse(text, format) == (said, tuple(ToolCall(name=name, arguments=written) for name, written in found))
