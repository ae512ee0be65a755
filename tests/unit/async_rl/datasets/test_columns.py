"""Columns by dotted path, and templates over a row."""

from typing import Any

import pytest

from async_rl.datasets.columns import MissingColumn, Template, column
from async_rl.errors import ConfigError

ROW = {
    "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2="}],
    "reward_model": {"ground_truth": "4", "style": "rule"},
    "a.b": 1,
    "a": {"b": 2},
    "a name": "x",
}


@pytest.mark.parametrize(
    ("path", "value"),
    [("reward_model.ground_truth", "4"), ("prompt.0.content", "Be brief."), ("prompt.-1.content", "2+2="), ("a.b", 1)],
)
def test_a_path_leads_into_a_column(path: str, value: Any):
    assert column(ROW, path) == value


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("quastion", "has no column 'quastion'; it has prompt, reward_model, a.b, a, a name"),
        ("reward_model.truth", "has no column 'reward_model.truth'; reward_model has ground_truth, style"),
        ("prompt.2.content", "has no column 'prompt.2.content'; prompt has 2 items"),
        ("reward_model.style.x", "has no column 'reward_model.style.x'; reward_model.style has 'rule'"),
    ],
)
def test_a_path_that_leads_nowhere_says_what_is_there(path: str, sentence: str):
    with pytest.raises(MissingColumn) as caught:
        column(ROW, path)
    assert str(caught.value) == sentence


def test_a_template_writes_the_prompt():
    assert Template("{{ row['a name'] }}: {{ prompt[1].content }}\n")(ROW) == "x: 2+2=\n"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{{ quastion }}", "'quastion' is undefined"),
        ("{{ reward_model.truth }}", "has no attribute 'truth'"),
        ("{{ prompt.__class__.__mro__ }}", "unsafe"),
        ("{{ prompt.append(1) }}", "unsafe"),
        ("{{ reward_model.ground_truth + 1 }}", "concatenate"),
    ],
)
def test_a_template_sees_nothing_but_the_row(text: str, sentence: str):
    with pytest.raises(ValueError, match=sentence):
        Template(text)(ROW)
    assert len(ROW["prompt"]) == 2


def test_a_template_that_is_none_is_refused():
    with pytest.raises(ConfigError, match=r"the template '\{\{ question' is not valid"):
        Template("{{ question")
