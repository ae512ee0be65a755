"""Datasets in local files and folders: which files make a split, which rows a slice and filters leave, and who is told what."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from async_rl.config.hub.datasets import DatasetConfig
from async_rl.datasets.opening import open_rows
from async_rl.errors import ConfigError

pyarrow = pytest.importorskip("pyarrow", reason="the optional package pyarrow is not installed")

CARD = """---
license: mit
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: [main/test-0.parquet, main/**/more.jsonl]
- config_name: socratic
  data_files: {train: "socratic"}
---
# Sums
"""


def rows(*numbers: int) -> list[dict[str, Any]]:
    return [{"question": f"{number}+1=", "answer": str(number + 1), "level": number % 3} for number in numbers]


def write(folder: Path, files: Mapping[str, Sequence[Mapping[str, Any]] | str]) -> Path:
    """Write files of rows, in the format of their suffix, or text."""
    from pyarrow import parquet

    for name, content in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, str):
            file.write_text(content)
        elif file.suffix == ".parquet":
            parquet.write_table(pyarrow.Table.from_pylist(list(content)), file)
        elif file.suffix == ".json":
            file.write_text(json.dumps(content))
        else:
            file.write_text("".join(json.dumps(row) + "\n" for row in content))
    return folder


def questions(path: Path | str, **config: Any) -> list[str]:
    return [row["question"] for row in open_rows(DatasetConfig(path=str(path), **config))]


def said(**config: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        open_rows(DatasetConfig(**config))
    assert "\n" not in str(caught.value)
    return str(caught.value)


# -- files ------------------------------------------------------------------------------------------------------------
def test_a_card_says_which_files_make_a_split(tmp_path: Path):
    folder = write(
        tmp_path,
        {
            "README.md": CARD,
            "main/train-0.parquet": rows(0, 1),
            "main/train-1.parquet": rows(2),
            "main/test-0.parquet": rows(3),
            "main/more.jsonl": rows(4),
            "socratic/all.json": rows(5, 6),
        },
    )
    assert questions(folder, subset="main") == ["0+1=", "1+1=", "2+1="]
    assert sorted(questions(folder, subset="main", split="test")) == ["3+1=", "4+1="]
    assert questions(folder, subset="socratic") == ["5+1=", "6+1="]
    assert said(path=str(folder)).endswith("has several subsets: set subset to one of main, socratic")
    assert said(path=str(folder), subset="missing").endswith("has no subset 'missing'; it has main, socratic")
    assert said(path=str(folder), subset="main", split="dev").endswith("has no split 'dev' in subset main; it has train, test")


def test_one_subset_of_a_card_may_be_the_default(tmp_path: Path):
    card = CARD.replace("config_name: socratic", "config_name: socratic\n  default: true")
    folder = write(tmp_path, {"README.md": card, "main/train-0.jsonl": rows(0), "socratic/a.jsonl": rows(5)})
    assert questions(folder) == ["5+1="]


def test_without_a_card_names_say_what_belongs_to_a_split(tmp_path: Path):
    by_file = write(tmp_path / "a", {"data/train-00000-of-00001.jsonl": rows(0), "data/test.jsonl": rows(1), "LICENSE": "x"})
    assert (questions(by_file), questions(by_file, split="test")) == (["0+1="], ["1+1="])
    assert said(path=str(by_file), split="validation").endswith(
        "has no split 'validation'; its files are named after test, train"
    )
    by_folder = write(tmp_path / "b", {"main/train/0000.jsonl": rows(0), "main/test/0000.jsonl": rows(1)})
    write(by_folder, {"other/train/0000.jsonl": rows(2), ".cache/train.jsonl": rows(9)})
    assert (questions(by_folder, subset="main"), questions(by_folder, subset="other")) == (["0+1="], ["2+1="])
    assert said(path=str(by_folder)).endswith("has several subsets: set subset to one of main, other")
    assert said(path=str(by_folder), subset="x").endswith("has no subset 'x'; it has the folders main, other")
    one = write(tmp_path / "c", {"dapo-math.jsonl": rows(7), "retrained.csv": "a,b"})
    assert questions(one) == ["7+1="]
    assert said(path=str(one), split="test").endswith("has no split 'test', only train")


def test_files_that_cannot_be_read_are_named_with_the_way_out(tmp_path: Path):
    folder = write(tmp_path, {"train.csv": "a,b", "README.md": "---\n: [\n---\n"})
    assert "has no .parquet, .jsonl, .json files in split 'train', only .csv; for most datasets the Hub keeps Parquet" in said(
        path=str(folder)
    )


def test_json_may_be_a_list_or_lines(tmp_path: Path):
    write(tmp_path, {"list.json": rows(1, 2), "lines.json": "\n".join(json.dumps(row) for row in rows(3, 4))})
    assert questions(tmp_path / "list.json") == ["1+1=", "2+1="]
    assert questions(tmp_path / "lines.json") == ["3+1=", "4+1="]
    assert "is not JSON" in said(path=str(write(tmp_path, {"broken.json": "[{]"}) / "broken.json"))


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"path": "nowhere.jsonl"}, "there is no dataset nowhere.jsonl in "),
        ({"path": "./nowhere"}, "there is no dataset ./nowhere in "),
        ({"path": "configs/train/word_problems.jsonl", "subset": "main"}, "subset 'main' belongs to a folder or a dataset on"),
        ({"path": "configs/train/word_problems.jsonl", "revision": "v1"}, "revision 'v1' belongs to a dataset on the Hub"),
    ],
)
def test_mistakes_are_one_sentence(config: dict[str, str], sentence: str):
    assert said(**config).startswith(sentence)


# -- slices and filters -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("split", "first", "last"),
    [("train[:95%]", 0, 94), ("train[95%:]", 95, 99), ("train[10:20]", 10, 19), ("train[-5:]", 95, 99), ("train[:]", 0, 99)],
)
def test_a_split_can_be_sliced(tmp_path: Path, split: str, first: int, last: int):
    file = write(tmp_path, {"a.jsonl": rows(*range(100))}) / "a.jsonl"
    asked = questions(file, split=split)
    assert (asked[0], asked[-1], len(asked)) == (f"{first}+1=", f"{last}+1=", last - first + 1)
    assert open_rows(DatasetConfig(path=str(file), split=split)).number(0) == first


def test_an_empty_slice_is_refused(tmp_path: Path):
    file = write(tmp_path, {"a.jsonl": rows(0, 1)}) / "a.jsonl"
    assert said(path=str(file), split="train[5:]").endswith("has no rows in train[5:]")


SOLVED = [
    {"text": "ab", "meta": {"tags": ["x", 1], "done": True}},
    {"text": "a\nb", "meta": {"tags": ["y", 2], "done": 1}},
    {"text": None, "meta": None},
    {"text": "abcdef", "meta": {"tags": [], "done": False}},
]


@pytest.mark.parametrize(
    ("filters", "kept"),
    [
        ([{"column": "meta.tags.0", "equals": "x"}], [0]),
        ([{"column": "meta.tags.-1", "one_of": [1, 2]}], [0, 1]),
        ([{"column": "meta.done", "equals": True}], [0]),  # true is not 1
        ([{"column": "text", "one_of": [None, "ab"]}], [0, 2]),
        ([{"column": "text", "matches": "^ab"}], [0, 3]),
        ([{"column": "meta.tags.1", "matches": "^[12]$"}], [0, 1]),
        ([{"column": "text", "max_characters": 3}], [0, 1, 2]),
        ([{"column": "meta.tags", "max_characters": 1}], [2, 3]),
        ([{"column": "text", "matches": "a", "max_characters": 3}, {"column": "meta.done", "equals": 1}], [1]),
    ],
)
@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_filters_keep_rows_and_their_numbers(tmp_path: Path, suffix: str, filters: list[dict[str, Any]], kept: list[int]):
    file = write(tmp_path, {f"a{suffix}": SOLVED}) / f"a{suffix}"
    config = DatasetConfig.model_validate({"path": str(file), "filters": filters})
    opened = open_rows(DatasetConfig.model_validate(config.model_dump()))  # as a run's config.yaml has it
    assert [opened.number(place) for place in range(len(opened))] == kept
    assert list(opened) == [SOLVED[number] for number in kept]


def test_a_filter_of_parquet_after_a_slice(tmp_path: Path):
    folder = write(tmp_path, {"train-0.parquet": rows(*range(5)), "train-1.parquet": rows(*range(5, 10))})
    config = {"path": str(folder), "split": "train[40%:]", "filters": [{"column": "level", "equals": 0}]}
    opened = open_rows(DatasetConfig.model_validate(config))
    assert [opened.number(place) for place in range(len(opened))] == [6, 9]
    assert [row["question"] for row in opened] == ["6+1=", "9+1="]
    assert opened.place(0) == f"row 1 of {folder / 'train-1.parquet'}"


def test_filters_that_keep_nothing_name_the_columns(tmp_path: Path):
    file = write(tmp_path, {"a.jsonl": rows(0, 1)}) / "a.jsonl"
    with pytest.raises(
        ConfigError, match=r"the filters leave none of the 2 rows of dataset .*, which has question, answer, level"
    ):
        open_rows(DatasetConfig.model_validate({"path": str(file), "filters": [{"column": "grade", "equals": 0}]}))


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"split": "train[5]"}, "is not a split such as train"),
        ({"filters": [{"column": "a"}]}, "a filter needs a condition"),
        ({"filters": [{"column": "a", "equals": None}]}, "a filter needs a condition"),
        ({"filters": [{"column": "a", "matches": "("}]}, "is not a regular expression"),
    ],
)
def test_wrong_settings_are_refused(config: dict[str, Any], sentence: str):
    with pytest.raises(ValidationError, match=sentence):
        DatasetConfig.model_validate({"path": "a.jsonl", **config})
