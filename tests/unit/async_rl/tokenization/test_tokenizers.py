"""Text <-> ids, for both kinds of tokenizers."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.config.tokenizer import CharacterTokenizer, HuggingFaceTokenizer
from async_rl.errors import ConfigError
from async_rl.tokenization.tokenizers import Characters, open_tokenizer
from async_rl.types import Message

ALPHABET = "0123456789=ab: \n"
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


@given(st.text(alphabet=ALPHABET))
def test_characters_decode_what_they_encode(text: str):
    tokenizer = Characters(ALPHABET)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_characters_have_the_documented_ids():
    tokenizer = open_tokenizer(CharacterTokenizer(alphabet="01="))
    assert tokenizer.vocab_size == 7
    assert tokenizer.end_id == 2
    assert tokenizer.encode("10=?") == [5, 4, 6, 3]
    assert tokenizer.render("0") == [1, 4]


def test_special_tokens_have_no_text_but_unknown_keeps_its_place():
    tokenizer = Characters("01")
    assert tokenizer.decode([1, 4, 3, 0, 5, 2]) == "0\N{REPLACEMENT CHARACTER}1"


def test_ids_of_a_padded_vocabulary_can_be_decoded():
    assert Characters("01").decode([127]) == "\N{REPLACEMENT CHARACTER}"


def test_messages_become_plain_lines():
    tokenizer = Characters(ALPHABET + "user")
    ids = tokenizer.render([Message(role="user", content="a"), Message(role="us", content="b")])
    assert ids[0] == 1
    assert tokenizer.decode(ids) == "user: a\nus: b\n"


@pytest.mark.parametrize("alphabet", ["", "aa"])
def test_an_alphabet_without_meaning_is_refused(alphabet: str):
    with pytest.raises(ConfigError, match=r"tokenizer\.alphabet"):
        open_tokenizer(CharacterTokenizer(alphabet=alphabet))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face tokenizer of single characters, with a chat template whose turns end with the end token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = [chr(code) for code in range(32, 127)] + ["\n"]
    vocabulary = {token: position for position, token in enumerate(["<unk>", "<|start|>", "<|end|>", *characters])}
    table = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    table.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    table.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=table, unk_token="<unk>", eos_token="<|end|>", additional_special_tokens=["<|start|>"]
    )
    tokenizer.chat_template = TEMPLATE
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(folder)
    return folder


def test_a_hugging_face_folder_is_opened(folder: Path):
    tokenizer = open_tokenizer(HuggingFaceTokenizer(type="huggingface", folder=folder))
    assert tokenizer.vocab_size == 3 + 96
    assert tokenizer.end_id == 2
    assert tokenizer.decode([*tokenizer.encode("4 + 5"), tokenizer.end_id]) == "4 + 5"


@pytest.mark.parametrize("closes_itself", [True, False])
def test_a_conversation_continued_token_by_token_is_what_the_template_renders(folder: Path, closes_itself: bool):
    tokenizer = open_tokenizer(HuggingFaceTokenizer(type="huggingface", folder=folder))
    asked, answered, told = Message(role="user", content="2+2"), "5", Message(role="user", content="no")
    sampled = [*tokenizer.encode(answered), *([tokenizer.end_id] if closes_itself else [])]

    row = tokenizer.render([asked]) + sampled + tokenizer.render_reply(told, after_end=closes_itself)

    assert row == tokenizer.render([asked, Message(role="assistant", content=answered), told])


def test_a_missing_or_empty_folder_is_one_sentence(tmp_path: Path):
    with pytest.raises(ConfigError, match="is not a folder"):
        open_tokenizer(HuggingFaceTokenizer(type="huggingface", folder=tmp_path / "none"))
    with pytest.raises(ConfigError, match="has no tokenizer"):
        open_tokenizer(HuggingFaceTokenizer(type="huggingface", folder=tmp_path))


def test_importing_the_tokenizers_brings_neither_torch_nor_transformers():
    code = "import sys, async_rl.testing; sys.exit(not {'torch', 'transformers'}.isdisjoint(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
