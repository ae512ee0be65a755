"""A tokenizer of characters that was written down for Hugging Face says what it said before."""

from pathlib import Path

import pytest

from async_rl.tokenization.character_files import write_character_files
from async_rl.tokenization.tokenizers import Characters, HuggingFace
from async_rl.types import Message, Tool, ToolCall

ALPHABET = "0123456789=ab:\n\"'{}, <>/_ä"
ONE = (Message(role="user", content="12="), Message(role="assistant", content="3"), Message(role="user", content="4="))
CALLING = (
    Message(role="assistant", content="", tool_calls=(ToolCall(id="1", name="add", arguments='{"a": 1}'),)),
    Message(role="tool", content="3", tool_call_id="1"),
)
TOOL = Tool(name="add", description="", parameters={"a": {"b": 1}})


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Characters, HuggingFace]:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    write_character_files(folder, ALPHABET)
    return Characters(ALPHABET), HuggingFace(folder)


@pytest.mark.parametrize("text", ["", "1", "12=3", "a\nb", "Zebra 1 \N{REPLACEMENT CHARACTER}", "  äß\t\u2028b  "])
def test_texts_become_the_same_tokens_and_back(both: tuple[Characters, HuggingFace], text: str) -> None:
    ours, theirs = both
    tokens = ours.encode(text)
    assert theirs.encode(text) == tokens
    assert theirs.render(text) == ours.render(text)
    assert theirs.decode(tokens) == ours.decode(tokens)


def test_special_tokens_are_the_same(both: tuple[Characters, HuggingFace]) -> None:
    ours, theirs = both
    assert (theirs.vocab_size, theirs.end_id) == (ours.vocab_size, ours.end_id)
    assert theirs.decode([0, 1, 2, 3, 4]) == ours.decode([0, 1, 2, 3, 4])


@pytest.mark.parametrize(("conversation", "tools"), [(ONE, ()), (CALLING, (TOOL,))], ids=["plain", "tools"])
def test_conversations_are_rendered_alike(
    both: tuple[Characters, HuggingFace], conversation: tuple[Message, ...], tools: tuple[Tool, ...]
) -> None:
    ours, theirs = both
    assert theirs.render(conversation, tools) == ours.render(conversation, tools)
