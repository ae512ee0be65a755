"""From rows of a table to packed rows: which tokens are learned, in which order, and what people are told of bad rows."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from async_rl.cli.train import load_any, load_training
from async_rl.config.loading import resolve, shipped_configs
from async_rl.config.training import METHODS, DataConfig, Method
from async_rl.errors import ConfigError
from async_rl.protocols import Tokenizer
from async_rl.tokenization.rendering import RenderedText, read_messages, read_tools
from async_rl.tokenization.tokenizers import Characters, HuggingFace
from learner.training.examples import Example, ExampleReader
from learner.training.packed import pack
from learner.training.table import Table, TokenLimits
from tests.support.small_tokenizer import CHATML, HEADERS, THINKING, make_tokenizer

CHARACTERS = Characters("0123456789=")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    return {
        name: HuggingFace(make_tokenizer(tmp_path_factory.mktemp(name), template))
        for name, template in {"chatml": CHATML, "thinking": THINKING, "headers": HEADERS}.items()
    }


def read(
    row: Mapping[str, Any], tokenizer: Tokenizer = CHARACTERS, *, pairs: bool = False, **data: Any
) -> tuple[RenderedText, ...]:
    config = DataConfig(path="x.jsonl", **data)
    return ExampleReader.of(config, tokenizer, compares=pairs)(row).texts


def said(text: RenderedText, tokenizer: Tokenizer = CHARACTERS) -> tuple[str, str]:
    """What the model reads, and what it says."""
    parts = (
        [each for each, is_said in zip(text.token_ids, text.trained, strict=True) if is_said is wanted]
        for wanted in (False, True)
    )
    given, own = (list(part) for part in parts)
    return tokenizer.decode(given), tokenizer.decode(own)


def conversation(*turns: str) -> list[dict[str, str]]:
    return [{"role": "assistant" if place % 2 else "user", "content": turn} for place, turn in enumerate(turns)]


# -- rows of a table ------------------------------------------------------------------------------------------------------
def test_an_answer_is_what_a_rollout_would_be():
    (text,) = read({"prompt": "3=", "response": "45"})
    assert text.token_ids == [*CHARACTERS.render("3="), *CHARACTERS.encode("45"), CHARACTERS.end_id]
    assert said(text) == ("3=", "45")
    assert text.trained[-1]  # the end is learned too


def test_all_of_a_text_is_learned():
    (text,) = read({"text": "3=45"})
    assert text.trained == [False, True, True, True, True, True]


@pytest.mark.parametrize("template", ["chatml", "thinking"])
def test_of_a_conversation_the_assistants_words_are_learned(chat: dict[str, Tokenizer], template: str):
    tokenizer = chat[template]
    (text,) = read({"messages": conversation("hello", "hi", "more?", "yes", "ignored")}, tokenizer)
    given, own = said(text, tokenizer)
    assert own == "hiyes"
    assert "hello" in given
    assert "more?" in given
    assert "ignored" not in given  # nobody answers it
    assert sum(text.trained) == len(tokenizer.encode("hi")) + len(tokenizer.encode("yes")) + 2  # each with its end


def test_a_prompt_can_be_a_users_message(chat: dict[str, Tokenizer]):
    tokenizer = chat["chatml"]
    asked = {"prompt": "hello", "response": "hi"}
    messages = [{"role": "system", "content": "be brief"}, *conversation("hello", "hi")]
    assert read(asked, tokenizer, system="be brief") == read({"messages": messages}, tokenizer)
    assert read(asked, tokenizer, chat=True) == read({"messages": conversation("hello", "hi")}, tokenizer)


def test_a_pair_shares_its_prompt(chat: dict[str, Tokenizer]):
    tokenizer = chat["chatml"]
    as_texts = read({"prompt": "hello", "chosen": "hi", "rejected": "no"}, tokenizer, pairs=True, chat=True)
    whole = {"chosen": conversation("hello", "hi"), "rejected": conversation("hello", "no")}
    assert as_texts == read(whole, tokenizer, pairs=True)
    assert [said(text, tokenizer)[1] for text in as_texts] == ["hi", "no"]


def test_an_earlier_answer_that_both_share_is_not_compared(chat: dict[str, Tokenizer]):
    whole = {"chosen": conversation("a", "b", "c", "d"), "rejected": conversation("a", "b", "c", "e")}
    assert [said(text, chat["chatml"])[1] for text in read(whole, chat["chatml"], pairs=True)] == ["d", "e"]


SEARCH = {"name": "search", "description": "Looks things up.", "parameters": {"type": "object", "properties": {"q": {}}}}
CALLS = [
    {"id": "c1", "type": "function", "function": {"name": "search", "arguments": '{"q": "tea"}'}},
    {"name": "search", "arguments": {"q": "milk"}},
]
TOOL_ROW = {
    "tools": [{"type": "function", "function": SEARCH}],
    "messages": [
        {"role": "user", "content": "What is tea?", "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": CALLS[:1]},
        {"role": "tool", "content": "a drink", "tool_call_id": "c1"},
        {"role": "assistant", "content": "One more.", "tool_calls": CALLS[1:]},
        {"role": "tool", "content": "white", "name": "search"},
        {"role": "assistant", "content": "A drink, with milk."},
    ],
}
HERMES = '\n<tool_call>\n{"name": "search", "arguments": {"q": "%s"}}\n</tool_call>'


@pytest.mark.parametrize(
    ("template", "learned"),
    [
        ("chatml", (HERMES % "tea", "One more." + HERMES % "milk", "A drink, with milk.")),
        (
            "headers",
            (
                '{"name": "search", "parameters": {"q": "tea"}}',
                '{"name": "search", "parameters": {"q": "milk"}}',
                "A drink, with milk.",
            ),
        ),
    ],
)
def test_tool_calls_are_learned_as_the_template_writes_them_and_their_results_are_read(
    chat: dict[str, Tokenizer], template: str, learned: Sequence[str]
):
    tokenizer = chat[template]
    (text,) = read(TOOL_ROW, tokenizer)
    given, own = said(text, tokenizer)
    assert own == "".join(learned)
    assert ("Looks things up" in given) == (template == "chatml")  # the other template has no place for tools
    assert "a drink" in given
    assert "white" in given
    assert sum(text.trained) == sum(len(tokenizer.encode(answer)) for answer in learned) + 3  # each with its end
    whole = tokenizer.render(read_messages(TOOL_ROW["messages"]), read_tools(TOOL_ROW["tools"]))
    assert whole[: len(text)] == text.token_ids, "the same as the template makes of the whole conversation"
    assert read({**TOOL_ROW, "tools": json.dumps([SEARCH])}, tokenizer) == (text,)  # as Parquet has them


def test_a_template_without_tool_calls_is_refused(chat: dict[str, Tokenizer]):
    with pytest.raises(ValueError, match="does not render tool calls"):
        read(TOOL_ROW, chat["thinking"])


def test_characters_write_tool_calls_as_well():
    tokenizer = Characters("".join(sorted(set(json.dumps(TOOL_ROW) + "\n<>/_"))))
    (text,) = read(TOOL_ROW, tokenizer)
    assert (
        '<tool_call>{"name": "search", "arguments": {"q": "tea"}}</tool_call>One more.<tool_call>' in said(text, tokenizer)[1]
    )


def test_columns_may_have_other_names():
    columns = {"prompt": "question", "response": "answer"}
    assert read({"question": "3=", "answer": "4"}, columns=columns) == read({"prompt": "3=", "response": "4"})


# -- mistakes -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("row", "pairs", "sentence"),
    [
        (
            {"question": "3=", "id": 1},
            False,
            "has the columns question, id; needed are prompt and response, or messages, or text",
        ),
        ({"prompt": "3=", "response": None}, False, "has the columns prompt, response; needed are"),
        ({"prompt": "3=", "chosen": "4"}, True, "needed are chosen and rejected"),
        ({"prompt": "3=", "chosen": "4", "rejected": "4"}, True, "the same answer as chosen and as rejected"),
        ({"chosen": "4", "rejected": "5"}, True, "has no prompt"),
        ({"prompt": 3, "response": "4"}, False, r"has 3, which is neither a text nor a list of messages \{role, content\}"),
        ({"messages": "4"}, False, r"has '4', which is no list of messages"),
        ({"prompt": "3=", "response": 4}, False, "has 4, which is neither a text nor a list"),
        ({"text": 4}, False, "has a text that is not a string: 4"),
        ({"messages": [{"role": "user"}]}, False, r"a message must be \{role, content\}"),
        ({"messages": conversation("3=")}, False, "nothing to train"),
        ({"messages": [{"role": "assistant", "content": "4"}]}, False, "begins with the assistant"),
        (
            {"messages": [{"role": "assistant", "content": "", "tool_calls": [1]}]},
            False,
            r"a tool call must be \{name, arguments\}",
        ),
        ({"messages": [{"role": "user", "content": "", "tool_calls": [1]}]}, False, "only the assistant makes tool_calls"),
        ({"messages": conversation("3=", "4"), "tools": "search"}, False, "has 'search', which is not JSON"),
        ({"messages": conversation("3=", "4"), "tools": {}}, False, "has tools that are no list"),
        ({"messages": conversation("3=", "4"), "tools": [{}]}, False, "a tool must be"),
        ({"prompt": "3=", "response": "4" * 20}, False, r"has 24 tokens, which is too long: batch.bin_tokens is 20"),
        ("nothing", False, "is not a JSON object"),
    ],
)
def test_a_bad_row_is_one_sentence_with_file_and_line(tmp_path: Path, row: Any, pairs: bool, sentence: str):
    path = tmp_path / "rows.jsonl"
    good = {"prompt": "3=", "chosen": "4", "rejected": "5"} if pairs else {"prompt": "3=", "response": "4"}
    path.write_text("\n".join([json.dumps(good), "", json.dumps(row)]))  # an empty line is nothing, and counts
    with pytest.raises(ConfigError, match=sentence) as caught:
        table(path, pairs=pairs).slice_at(0, 2)
    assert str(caught.value).startswith(f"{path}:3")
    assert "\n" not in str(caught.value)


def table(path: Path, *, pairs: bool = False, seed: int = 0, **data: Any) -> Table:
    config = DataConfig(path=str(path), shuffle=data.pop("shuffle", False), **data)
    reader = ExampleReader.of(config, CHARACTERS, compares=pairs)
    return Table.to_train(config, reader, TokenLimits(row=20, context=15), seed=seed)


def write(path: Path, lengths: Sequence[int]) -> Path:
    path.write_text("".join(json.dumps({"prompt": "3=", "response": "4" * length}) + "\n" for length in lengths))
    return path


def test_columns_are_found_by_path_and_a_template_writes_the_prompt():
    row = {"qa": {"answer": "4"}, "left": "3", "texts": ["x", "5"]}
    columns = {"response": "qa.answer"}
    assert read(row, columns=columns, template="{{ left }}=") == read({"prompt": "3=", "response": "4"})
    pair = read(row, pairs=True, columns={"chosen": "qa.answer", "rejected": "texts.1"}, template="{{ left }}=")
    assert pair == read({"prompt": "3=", "chosen": "4", "rejected": "5"}, pairs=True)
    with pytest.raises(ValueError, match="does not fit the template: 'right' is undefined"):
        read(row, columns=columns, template="{{ right }}=")


def test_several_datasets_are_mixed_by_weight_from_any_place_on(tmp_path: Path):
    write(tmp_path / "many.jsonl", [1] * 7)
    (tmp_path / "few.jsonl").write_text("".join(json.dumps({"q": "3=", "a": {"text": "5" * n}}) + "\n" for n in (2, 3)))
    data = {
        "path": None,  # as a file removes it that is merged over another
        "columns": {"response": "a.text"},
        "template": "{{ q }}",
        "datasets": [
            {"path": str(tmp_path / "many.jsonl"), "weight": 3, "columns": {}, "template": ""},
            {"path": str(tmp_path / "few.jsonl"), "split": "train[:2]"},
        ],
    }
    config = DataConfig.model_validate(data)
    assert DataConfig.model_validate(config.model_dump()) == config

    def mixed() -> Table:
        return Table.to_train(
            config, ExampleReader.of(config, CHARACTERS, compares=False), TokenLimits(row=20, context=15), seed=1
        )

    whole = mixed().slice_at(0, 16)
    assert len(mixed()) == 9
    assert whole.by_dataset == {"many": 12, "few": 4}
    own = [said(example.texts[0])[1] for example in whole.examples]
    assert sorted(each for each in own if "5" in each) == ["55", "55", "555", "555"]  # two epochs
    assert mixed().slice_at(5, 11).examples == whole.examples[5:]
    assert mixed().slice_at(0, 1).by_dataset in ({"many": 1, "few": 0}, {"many": 0, "few": 1})


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ({}, "give path, or datasets for several"),
        ({"path": "a.jsonl", "datasets": [{"path": "b.jsonl"}]}, "not both"),
        ({"datasets": [{"path": "x/a.jsonl"}, {"path": "y/a.jsonl"}]}, "two are 'a'; set `name` on one of them"),
        ({"datasets": [{"path": "a.jsonl"}], "held_out": {"every": 3}}, "path"),
        ({"path": "a.jsonl", "held_out": {"every": 3}}, "rows of a.jsonl that are also trained: give it a split of its own"),
        ({"path": "a.jsonl", "held_out": {"split": "train[:9]"}}, "also trained"),
        ({"path": "a.jsonl", "held_out": {"split": "test"}}, "also trained"),  # a file has no splits
        ({"path": "a.jsonl", "held_out": {"filters": [{"column": "level", "equals": 5}]}}, "also trained"),
        ({"datasets": [{"path": "a.jsonl"}, {"path": "b.jsonl"}], "held_out": {"path": "b.jsonl"}}, "also trained"),
    ],
)
def test_datasets_are_named_and_either_one_or_several(data: dict[str, Any], sentence: str):
    with pytest.raises(ValidationError, match=sentence):
        DataConfig.model_validate(data)


def test_held_out_rows_are_another_split_or_another_dataset_with_the_same_columns():
    data = {
        "path": "openai/gsm8k",
        "subset": "main",
        "columns": {"prompt": "question"},
        "filters": [{"column": "a", "equals": 1}],
    }
    same = DataConfig.model_validate({**data, "held_out": {"split": "test"}}).held_out
    other = DataConfig.model_validate({**data, "held_out": {"path": "b.jsonl"}}).held_out
    assert same is not None
    assert other is not None
    assert (same.path, same.subset, same.split, same.columns, same.filters) == (
        *("openai/gsm8k", "main", "test"),
        {"prompt": "question"},
        (),
    )
    assert (other.path, other.subset, other.columns) == ("b.jsonl", "", {"prompt": "question"})
    easy, hard = ({"filters": [{"column": "level", "equals": level}]} for level in (1, 5))
    for trained, apart in (
        ({"path": "a.jsonl", "split": "train[:95%]"}, {"split": "train[95%:]"}),
        ({"path": "a.jsonl", **easy}, hard),
        ({"path": "me/rows"}, {"split": "test"}),
    ):
        assert DataConfig.model_validate({**trained, "held_out": apart}).held_out is not None


def test_what_is_too_long_can_be_left_out(tmp_path: Path):
    """Its place in the order stays, so that the position means the same."""
    portion = table(write(tmp_path / "rows.jsonl", [3, 18, 4, 12]), too_long="drop").slice_at(0, 4)
    assert [example.texts[0].num_trained for example in portion.examples] == [4, 5]
    assert (portion.dropped, portion.end) == (2, 4)


def test_every_epoch_has_an_order_of_its_own_and_a_place_says_where_it_stands(tmp_path: Path):
    path = write(tmp_path / "rows.jsonl", list(range(1, 11)))

    def lengths(start: int, count: int, seed: int = 0) -> list[int]:
        portion = table(path, shuffle=True, seed=seed).slice_at(start, count)
        return [example.texts[0].num_trained for example in portion.examples]

    assert sorted(lengths(0, 10)) == sorted(lengths(10, 10)) == list(range(2, 12))
    assert lengths(0, 10) != lengths(10, 10)
    assert lengths(7, 6) == lengths(0, 20)[7:13]
    assert lengths(0, 10) != lengths(0, 10, seed=1)


# -- packing --------------------------------------------------------------------------------------------------------------
texts = st.lists(st.booleans(), min_size=2, max_size=12).map(
    lambda said: RenderedText(token_ids=list(range(10, 10 + len(said))), trained=said)
)
examples = st.one_of(texts.map(lambda text: (text,)), st.tuples(texts, texts)).map(lambda each: Example(texts=each))


@given(given=st.lists(examples, max_size=12), shards=st.integers(1, 3))
def test_packed_rows_hold_every_example_whole(given: list[Example], shards: int):
    packed = pack(given, capacity=24, num_shards=shards)
    assert len({len(rows) for rows in packed.shards}) == 1
    assert len(packed.shards[0]) >= 1
    held = [text for rows in packed.shards for row in rows for text in row]
    for example in given:
        starts = [place for place, text in enumerate(held) if text is example.texts[0]]
        assert any(tuple(held[start : start + len(example.texts)]) == example.texts for start in starts)
    trained = 0
    for shard in range(shards):
        for texts, row in zip(packed.shards[shard], packed.rows(shard, CPU), strict=True):
            assert sum(map(len, texts)) <= 24
            for text, start in zip(texts, row.cu_seqlens.tolist(), strict=False):
                assert row.token_ids[start : start + len(text)].tolist() == text.token_ids
                assert row.positions[start : start + len(text)].tolist() == list(range(len(text)))
                predicting = row.mask[start : start + len(text)].numpy().astype(bool)
                assert predicting.tolist() == [*text.trained[1:], False]
                assert row.targets[start : start + len(text)].numpy()[predicting].tolist() == list(
                    np.array(text.token_ids)[1:][predicting[:-1]]
                )
            trained += int(row.mask.sum())
    assert trained == packed.counts.tokens
    assert packed.counts.examples == len(given)


# -- configuration --------------------------------------------------------------------------------------------------------
MODEL = ("--model.size", "{hidden: 8, layers: 1, heads: 1}", "--data.path", "x.jsonl")


@pytest.mark.parametrize(
    ("method", "args", "sentence"),
    [
        ("sft", ("--dpo.beta", "1"), "dpo.*: there is no such key"),
        ("sft", ("--data.pth", "x"), "did you mean data.path"),
        ("sft", ("--method", "dpo"), "method .*should be 'sft'"),
        ("dpo", ("--dpo.variant", "ipo", "--dpo.label_smoothing", "0.1"), "label_smoothing belongs to variant: sigmoid"),
        ("distill", (), "distill: is required"),
        ("distill", ("--distill.teacher", "x", "--learner.parallel.pipeline", "2"), "set learner.parallel.pipeline to 1"),
        ("rm", ("--learner.steps", "1", "--learner.epochs", "1"), "give one of them"),
    ],
)
def test_a_mistake_names_its_key(method: Method, args: tuple[str, ...], sentence: str):
    with pytest.raises(ConfigError, match=sentence):
        load_training(method, [*MODEL, *args])


def test_without_a_file_one_is_named():
    with pytest.raises(ConfigError, match=r"start from one, for example: @ configs/train/sft\.yaml"):
        load_training("sft", [])


@pytest.mark.parametrize("method", METHODS)
def test_the_shipped_files_are_valid(method: Method):
    file = shipped_configs() / "train" / f"{method}.yaml"
    assert load_any(["@", str(file), "--run.name", "r"]).model_dump()["method"] == method


@pytest.mark.parametrize(("learner", "steps"), [({}, 7), ({"epochs": 2}, 13), ({"epochs": 0.5}, 4), ({"steps": 5}, 5)])
def test_epochs_are_so_many_steps(learner: dict[str, float], steps: int):
    words = [word for key, value in learner.items() for word in (f"--learner.{key}", str(value))]
    config = resolve(METHODS["sft"], [*MODEL, "--batch.examples_per_step", "16", *words], example="").config
    assert config.steps(100) == steps
