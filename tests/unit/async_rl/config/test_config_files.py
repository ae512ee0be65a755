"""What a command line and its files come to, and what a person is told when they are wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.config import Config
from async_rl.config.loading import load, load_with_origins, shipped_configs, to_yaml
from async_rl.config.located_yaml import dump, plain, read_file, read_value
from async_rl.config.tokenizer import HuggingFaceTokenizer
from async_rl.errors import ConfigError

BASE = """\
model:
  size: {hidden: 32, layers: 2, heads: 4}
environments:
  - type: counting
    args: {digits: 3}
  - type: even_digits
"""


@pytest.fixture
def base(tmp_path: Path) -> str:
    path = tmp_path / "base.yaml"
    path.write_text(BASE)
    return str(path)


def written(folder: Path, text: str, name: str = "other.yaml") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def problem(*args: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(args)
    return str(caught.value)


def test_later_files_and_then_overrides_win_key_by_key(base: str, tmp_path: Path) -> None:
    over = written(tmp_path, "staleness:\n  max_age: 5\nbatch: {group_size: 4}\n")
    loaded = load_with_origins(["@", base, f"@{over}", "--batch.group_size=2", "--run.seed", "-7"])
    config = loaded.config
    assert (config.staleness.max_age, config.batch.group_size, config.run.seed) == (5, 2, -7)
    assert config.model.size is not None
    assert config.model.size.hidden == 32
    origins = loaded.origins
    assert origins["staleness.max_age"] == f"{over}:2"
    assert origins["batch.group_size"] == "command line"
    assert origins["model.size.layers"] == f"{base}:2"
    assert origins["environments.0.args.digits"] == f"{base}:5"
    assert origins["learner.steps"] == "default"


def test_every_leaf_has_an_origin(base: str) -> None:
    loaded = load_with_origins(["@", base])
    assert {"sampling.stop", "learner.optimizer.betas", "environments.1.weight", "tokenizer.type"} <= set(loaded.origins)


def test_overrides_reach_into_lists(base: str) -> None:
    config = load(["@", base, "--environments.0.args.digits", "9", "--environments.1.weight", "2"])
    assert config.environments[0].args == {"digits": 9}
    assert config.environments[1].weight == 2.0


@pytest.mark.parametrize(("written_as", "expected"), [("1e-6", 1e-6), ("1.5E3", 1500.0), (".5", 0.5), ("2", 2.0), ("+3.", 3.0)])
def test_numbers_read_as_people_mean_them(base: str, tmp_path: Path, written_as: str, expected: float) -> None:
    file = written(tmp_path, f"learner: {{optimizer: {{learning_rate: {written_as}}}}}\n")
    assert load(["@", base, "@", file]).learner.optimizer.learning_rate == expected
    assert load(["@", base, "--learner.optimizer.learning_rate", written_as]).learner.optimizer.learning_rate == expected


@pytest.mark.parametrize("name", ["007", "1e5", "12", "no", "2026-01-01", "0x10"])
def test_text_keeps_its_characters(base: str, name: str) -> None:
    assert load(["@", base, "--run.name", name]).run.name == name


def test_an_argument_keeps_the_type_it_was_written_in(base: str) -> None:
    config = load(["@", base, "--environments.0.args", "{a: 1, b: 1.5, c: yes, d: true, e: '1e-6'}"])
    assert config.environments[0].args == {"digits": 3, "a": 1, "b": 1.5, "c": "yes", "d": True, "e": "1e-6"}
    assert config.environments[0].args["d"] is True


def test_the_resolved_tree_loads_back_equal(base: str, tmp_path: Path) -> None:
    awkward = "{a: '1e-6', b: 'no', c: '', d: '007', e: 1.0e-9, f: 'null', g: '# x', h: \"two\\nlines\"}"
    config = load(["@", base, "--environments.0.args", awkward, "--tokenizer.alphabet", "0123456789"])
    assert config.tokenizer.model_dump()["alphabet"] == "0123456789"
    assert load(["@", written(tmp_path, to_yaml(config))]) == config


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()


@settings(derandomize=True)
@given(SCALARS | st.lists(SCALARS))
def test_what_is_dumped_reads_back(value: object) -> None:
    text = dump({"key": value})  # type: ignore[dict-item]
    node = read_value(text, "here")
    assert plain(node) == {"key": value}


def test_changing_a_type_starts_its_section_afresh(base: str, tmp_path: Path) -> None:
    characters = written(tmp_path, "tokenizer: {type: characters, alphabet: ab}\n")
    args = ["@", base, "@", characters, "--tokenizer.folder", "/models/x", "--tokenizer.type", "huggingface"]
    assert load(args).tokenizer == HuggingFaceTokenizer(type="huggingface", folder=Path("/models/x"))


def test_anchors_and_merge_keys(base: str, tmp_path: Path) -> None:
    file = written(tmp_path, "leases: &same {ticket_s: 7}\n")
    assert load(["@", base, "@", file]).leases.ticket_s == 7
    file = written(tmp_path, "environments:\n  - &one {type: a, weight: 3}\n  - {<<: *one, type: b}\n")
    assert load(["@", base, "@", file]).environments[1].weight == 3


def test_shipped_files_are_found_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load(["@", "configs/quickstart.yaml"]) == load(["@", str(shipped_configs() / "quickstart.yaml")])


@pytest.mark.parametrize("file", sorted(path.name for path in shipped_configs().glob("*.yaml")))
def test_every_shipped_configuration_is_valid(file: str) -> None:
    assert isinstance(load(["@", f"configs/{file}"]), Config)


PROBLEMS = [
    (["--staleness.maxage", "3"], "staleness.maxage (command line): there is no such key; did you mean staleness.max_age?"),
    (["--max_age", "3"], "max_age (command line): there is no such key; did you mean staleness.max_age?"),
    (
        ["--environments.0.wweight", "2"],
        "environments.0.wweight (command line): there is no such key; did you mean environments.0.weight?",
    ),
    (["--staleness.max_age=-1"], "staleness.max_age (command line): should be greater than or equal to 0, but it is -1"),
    (["--worker.groups_in_flight=0"], "groups_in_flight (command line): should be greater than 0 or 'auto', but it is 0"),
    (["--worker.groups_in_flight=all"], "should be a whole number or 'auto', but it is 'all'"),
    (["--staleness", "3"], "staleness (command line): is a section with keys of its own, not the value 3"),
    (["--tokenizer.type", "hug"], "tokenizer (command line): the type 'hug' is not one of 'characters', 'huggingface'"),
    (["--environments.7.weight", "2"], "--environments.7.weight: the list has items 0 to 1, there is no item '7'"),
    (["--learner.optimizer.betas.0", "2"], "no file sets learner.optimizer.betas to a list"),
    (["--metrics.console"], "--metrics.console needs a value"),
    (["--metrics.console", "--run.seed", "1"], "--metrics.console needs a value"),
    (["stray"], "cannot read 'stray'"),
    (["--a..b", "1"], "--a..b is not a dotted key"),
    (["@"], "`@` must be followed by the path"),
    (["@", "nowhere.yaml"], "cannot read nowhere.yaml: No such file or directory"),
]


@pytest.mark.parametrize(("args", "sentence"), PROBLEMS, ids=lambda value: value[0] if isinstance(value, list) else "")
def test_what_a_person_is_told(base: str, args: list[str], sentence: str) -> None:
    assert sentence in problem("@", base, *args)


FILE_PROBLEMS = [
    (
        "staleness:\n  # why\n  max_agee: 1\n",
        "staleness.max_agee ({file}:3): there is no such key; did you mean staleness.max_age?",
    ),
    ("learner:\n  steps: many\n", "learner.steps ({file}:2): should be a valid integer"),
    ("run:\n  seed: 1\n  seed: 2\n", "the key 'seed' is written twice"),
    ("run: [1\nseed: 2\n", "{file}:2: not valid YAML"),
    ("- 1\n", "{file}:1: a configuration file holds `key: value` lines"),
    ("run: &r {name: *r}\n", "{file}:1: this value contains itself"),
    ("run: !!python/object/apply:os.system ['true']\n", "run ({file}:1): is a section with keys of its own"),
    ("run: {seed: !!python/name:os.system ''}\n", "the tag tag:yaml.org,2002:python/name:os.system is not supported"),
    ("environments: []\n", "environments ({file}:1)"),
    ("model: {size: {hidden: 30, layers: 1, heads: 4}}\n", "hidden (30) must be a multiple of heads (4)"),
    (
        "model: {size: {hidden: 32, layers: 1, heads: 4}, folder: x}\n",
        "give exactly one of model.name (a model on the Hugging Face Hub), model.folder and model.size",
    ),
]


@pytest.mark.parametrize(("text", "sentence"), FILE_PROBLEMS)
def test_what_a_person_is_told_about_a_file(base: str, tmp_path: Path, text: str, sentence: str) -> None:
    file = written(tmp_path, text)
    assert sentence.format(file=file) in problem("@", base, "@", file)


def test_each_wrong_key_gets_a_line_and_consequences_none(base: str) -> None:
    lines = problem("@", base, "--staleness.maxage", "3", "--environments", "[{type: x, wweight: 1}]").splitlines()
    assert [line.partition(" ")[0] for line in lines] == ["environments.0.wweight", "staleness.maxage"]


def test_without_any_file_it_says_where_to_start() -> None:
    said = problem("--run.seed", "1")
    assert "model: is required, but nothing sets it" in said
    assert "@ configs/quickstart.yaml" in said


def test_an_empty_file_changes_nothing(base: str, tmp_path: Path) -> None:
    assert load(["@", base, "@", written(tmp_path, "# nothing\n")]) == load(["@", base])
    assert read_file(Path(written(tmp_path, ""))).children == {}
