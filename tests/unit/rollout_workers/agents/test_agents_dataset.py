"""Tasks from tables: which row is posed when, how it becomes a task, and what its answer is worth."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.config.rollout import EnvironmentConfig
from async_rl.datasets.order import shuffled
from async_rl.datasets.rows import BadRow
from async_rl.errors import ConfigError
from async_rl.protocols import EpisodeContext
from async_rl.testing import ScriptedInference
from async_rl.types import Message, Ticket
from rollout_workers.agents import DatasetAgent
from rollout_workers.datasets import scoring
from rollout_workers.datasets.curriculum import CurriculumOrder, CurriculumStage
from rollout_workers.datasets.numbers import final_number
from rollout_workers.graders import open_graders
from rollout_workers.registry import build_agent
from rollout_workers.user_functions import awaited
from tests.support.waiting import PATIENCE_S

CONTEXT = EpisodeContext(ticket=Ticket(id="t0", task_index=0, version=0, attempt=1), sibling=0, seed=0)
SUMS = [{"question": f"{number}+1=", "answer": number + 1, "level": number % 3} for number in range(10)]


@pytest.fixture
def sums(tmp_path: Path) -> str:
    return write(tmp_path / "sums.jsonl", SUMS)


def write(file: Path, rows: Sequence[object]) -> str:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def agent(path: str, **args: Any) -> DatasetAgent:
    return DatasetAgent(name="sums", path=path, **{"prompt": "question", **args})


# -- order ------------------------------------------------------------------------------------------------------------
@given(size=st.integers(1, 150), key=st.text(max_size=3))
def test_a_shuffle_is_a_permutation(size: int, key: str):
    assert sorted(shuffled(place, size, key) for place in range(size)) == list(range(size))


def test_a_shuffle_mixes_well():
    """Places and rows of many shuffles, in 5 x 5 fields: each should hold its share."""
    fields = Counter((place // 20, shuffled(place, 100, str(key)) // 20) for key in range(200) for place in range(100))
    assert len(fields) == 25
    assert all(abs(count - 800) < 120 for count in fields.values())


def test_every_epoch_poses_every_row_once_in_an_order_of_its_own(sums: str):
    posed = [agent(sums).task(index) for index in range(30)]
    epochs = [[task.key for task in posed[start : start + 10]] for start in (0, 10, 20)]
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert {tuple(sorted(epoch)) for epoch in epochs} == {tuple(sorted(f"sums/train/{row}" for row in range(10)))}


def test_the_position_is_the_index_and_nothing_else(sums: str):
    """A worker that starts anew in the middle poses what the others pose there."""
    first, later = agent(sums), agent(sums)
    assert [first.task(index) for index in range(40)][25:] == [later.task(index) for index in range(25, 40)]
    assert [agent(sums, seed=1).task(index) for index in range(10)] != [first.task(index) for index in range(10)]


def test_without_shuffling_rows_come_as_they_stand(sums: str):
    posed = [agent(sums, shuffle=False).task(index) for index in (0, 1, 9, 10)]
    assert [task.prompt for task in posed] == ["0+1=", "1+1=", "9+1=", "0+1="]
    assert posed[1].answer == "2"


# -- curricula --------------------------------------------------------------------------------------------------------
CURRICULUM = """
from rollout_workers.datasets.curriculum import CurriculumStage

def easy_first():
    return [CurriculumStage(tasks=8, weight=lambda row: row["level"] == 0), CurriculumStage(weight=lambda row: row["level"])]
"""


def test_a_curriculum_filters_and_weighs(sums: str, tmp_path: Path):
    (tmp_path / "curriculum.py").write_text(CURRICULUM)
    staged = agent(sums, curriculum=f"{tmp_path / 'curriculum.py'}:easy_first", columns=["level"])
    levels = [staged.task(index).data["level"] for index in range(608)]
    assert levels[:8] == [0] * 8
    assert Counter(staged.task(index).key for index in range(8)) == {f"sums/train/{row}": 2 for row in (0, 3, 6, 9)}
    later = Counter(levels[8:])
    assert set(later) == {1, 2}
    assert 330 < later[2] < 470  # two thirds of 600
    assert [staged.task(index) for index in (3, 300)] == [staged.task(index) for index in (3, 300)]


def test_a_stage_begins_at_its_first_row():
    stages = [
        CurriculumStage(tasks=3, weight=lambda row: row["level"] == 0),
        CurriculumStage(tasks=2, weight=bool),
        CurriculumStage(weight=lambda row: row["level"] == 1),
    ]
    staged = CurriculumOrder(SUMS, stages, seed="", is_shuffled=False)
    assert [staged.row(index) for index in range(10)] == [0, 3, 6, 0, 1, 1, 4, 7, 1, 4]


@pytest.mark.parametrize(
    ("stages", "sentence"),
    [
        ([], "needs stages"),
        ([CurriculumStage(weight=bool), CurriculumStage(weight=bool)], "each but the last needs tasks"),
        ([CurriculumStage(weight=lambda row: 0)], "stage 0 of the curriculum leaves out every row"),
    ],
)
def test_a_curriculum_that_poses_nothing_is_refused(stages: list[CurriculumStage], sentence: str):
    with pytest.raises(ConfigError, match=sentence):
        CurriculumOrder(SUMS, stages, seed="", is_shuffled=True)


# -- rows to tasks ----------------------------------------------------------------------------------------------------
def test_a_prompt_may_be_a_conversation(tmp_path: Path):
    asked = [{"role": "user", "content": "1+1"}]
    path = write(tmp_path / "chat.jsonl", [{"prompt": asked, "answer": "2"}])
    assert DatasetAgent(name="chat", path=path).task(0).prompt == (Message(role="user", content="1+1"),)
    told = DatasetAgent(name="chat", path=path, system="Be brief.").task(0).prompt
    assert told == (Message(role="system", content="Be brief."), Message(role="user", content="1+1"))


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        (3, "has 3, which is neither a text nor a list of messages"),
        ([{"role": "user"}], "both strings, but one is"),
        ([{"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}], "a tool call must be"),
    ],
)
def test_a_prompt_that_is_neither_a_text_nor_messages_is_refused_with_its_line(tmp_path: Path, asked: object, sentence: str):
    path = write(tmp_path / "chat.jsonl", [{"prompt": asked, "answer": "2"}])
    with pytest.raises(BadRow, match=sentence) as caught:
        DatasetAgent(name="chat", path=path).task(0)
    assert str(caught.value).startswith(f"{path}:1: ")


def test_a_text_becomes_a_message_where_a_template_is_wanted(sums: str):
    assert agent(sums, shuffle=False, chat=True).task(0).prompt == (Message(role="user", content="0+1="),)


def test_blank_lines_are_no_rows_and_long_ones_are(tmp_path: Path):
    file = tmp_path / "sums.jsonl"
    file.write_text("\n" + json.dumps({"question": "é" * 100_000, "answer": "x"}) + '\n\n{"question": "2", "answer": "y"}')
    posed = [agent(str(file), shuffle=False).task(index) for index in range(3)]
    assert [len(task.prompt) for task in posed] == [100_000, 1, 100_000]


GSM8K = {"prompt": "question", "answer_after": "####", "scoring": "number", "chat": True}


def test_the_shipped_word_problems_have_numbers_as_answers_which_their_solutions_reach():
    posed = agent("configs/train/word_problems.jsonl", shuffle=False, **GSM8K)
    assert posed.num_tasks == 12
    for index in range(12):
        task = posed.task(index)
        assert isinstance(task.prompt, tuple)
        assert float(task.answer) > 0
        assert posed.reward(task, f"... = {task.answer}.00") == 1.0
        assert posed.reward(task, f"... = {task.answer}1") == 0.0


def test_rows_in_the_shape_of_dapo_math(tmp_path: Path):
    asked = [{"role": "user", "content": "Solve. The last line is Answer: $Answer.\n\n2+2="}]
    row = {
        "data_source": "math_dapo",
        "prompt": asked,
        "reward_model": {"ground_truth": "34", "style": "rule"},
        "extra_info": {"index": "a"},
    }
    path = write(tmp_path / "dapo.jsonl", [row])
    posed = agent(
        path, prompt="prompt", answer="reward_model.ground_truth", scoring="number", columns=["extra_info.index", "data_source"]
    )
    task = posed.task(0)
    assert task.prompt == (Message(role="user", content=asked[0]["content"]),)
    assert (task.answer, task.data) == ("34", {"extra_info.index": "a", "data_source": "math_dapo"})
    assert [posed.reward(task, said) for said in ("so\nAnswer: $34$", "Answer: 43")] == [1.0, 0.0]


def test_a_template_makes_the_prompt(sums: str):
    asked = agent(sums, shuffle=False, prompt="none", template="{{ question }} (level {{ level }})").task(2)
    assert asked.prompt == "2+1= (level 2)"
    with pytest.raises(BadRow, match=r"sums\.jsonl:1: does not fit the template: 'hint' is undefined"):
        agent(sums, shuffle=False, template="{{ hint }}").task(0)


def test_slices_and_filters_keep_the_keys_of_rows(sums: str):
    whole = {task.prompt: task.key for task in map(agent(sums).task, range(10))}
    part = agent(sums, split="train[50%:]", filters=[{"column": "level", "equals": 0}])
    assert part.num_tasks == 2
    assert {task.prompt: task.key for task in map(part.task, range(2))} == {asked: whole[asked] for asked in ("6+1=", "9+1=")}


async def test_several_datasets_are_mixed_by_weight_and_counted_apart(sums: str, tmp_path: Path):
    """With `multi_task`, whose tasks carry the name of their dataset, as metrics do."""
    more = write(tmp_path / "more.jsonl", [{"prompt": "x=", "reward": {"truth": "1"}}] * 3)
    members = [
        {"type": "dataset", "name": "sums", "weight": 3, "args": {"path": sums, "prompt": "question"}},
        {"type": "dataset", "name": "more", "args": {"path": more, "answer": "reward.truth"}},
    ]
    mixed = build_agent(EnvironmentConfig(type="multi_task", name="math", args={"environments": members}), seed=0)
    later = build_agent(EnvironmentConfig(type="multi_task", name="math", args={"environments": members}), seed=0)
    posed = [mixed.task(index) for index in range(40)]
    assert Counter(task.environment for task in posed) == {"math.sums": 30, "math.more": 10}
    assert Counter(task.key for task in posed if task.environment == "math.sums") == {
        f"sums/train/{row}": 3 for row in range(10)
    }
    assert [later.task(index) for index in range(20, 40)] == posed[20:]


# -- scoring ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("scoring", "said", "reward"),
    [("exact_match", " 1\n", 1), ("exact_match", "1.", 0), ("contains", "it is 1!", 1), ("contains", "none", 0)],
)
async def test_answers_are_scored_by_name(sums: str, scoring: str, said: str, reward: float):
    posed = agent(sums, shuffle=False, scoring=scoring)
    inference = ScriptedInference(lambda text: said)
    inference.tokenizer = type(inference.tokenizer)(" \n.!0123456789abcdefghijklmnopqrstuvwxyz+=")
    assert (await posed.rollout(posed.task(0), inference, CONTEXT)).reward == reward


async def test_a_scoring_function_of_ones_own_is_used(sums: str, tmp_path: Path):
    (tmp_path / "mine.py").write_text("async def score(task, response):\n    return len(response) + task.data['level']\n")
    posed = agent(sums, shuffle=False, scoring=f"{tmp_path / 'mine.py'}:score", columns=["level"])
    assert (await posed.rollout(posed.task(2), ScriptedInference(lambda text: "123"), CONTEXT)).reward == 5


@pytest.mark.parametrize(
    ("said", "number"),
    [
        ("It is 1,234.50 dollars.", "2469/2"),
        ("First 5, then -3", "-3"),
        ("5-3", "3"),
        ("#### $1000 \n(2 notes)", "1000"),
        (r"\boxed{7} and 8, then \boxed{ 9 }. That is 10", "9"),
        ("3 / 4 of it", "3/4"),
        ("costs .5", "1/2"),
        ("**18**", "18"),
        ("no number", None),
        ("1/0", None),
        ("#### none, 5", "5"),
    ],
)
def test_the_final_number_of_an_answer(said: str, number: str | None):
    assert final_number(said) == (Fraction(number) if number is not None else None)


def test_an_answer_that_is_no_number_fails_the_episode_instead_of_scoring_0(sums: str):
    posed = agent(sums, shuffle=False, answer="question", scoring="number", filters=[{"column": "level", "equals": 0}])
    task = replace(posed.task(0), answer="x")
    with pytest.raises(ValueError, match=r"the answer 'x' of task sums/train/0 is not a number"):
        posed.reward(task, "5")


MATH = [
    ("0.5", r"so $\frac{1}{2}$", 1),
    (r"\frac{1}{2}", "The answer is 1/2", 1),
    ("42", r"\boxed{42}", 1),
    ("42", r"\boxed{24}", 0),
    ("42", "I do not know", 0),
]


async def test_mathematics_is_compared_by_what_it_means(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("math_verify", reason="the optional package math-verify is not installed")
    monkeypatch.setattr(scoring, "MATH_S", PATIENCE_S)
    path = write(tmp_path / "math.jsonl", [{"question": "1=", "answer": answer} for answer, _, _ in MATH])
    posed = agent(path, shuffle=False, scoring="math")
    async with open_graders():
        for index, (_, said, worth) in enumerate(MATH):
            assert await awaited(posed.reward(posed.task(index), said)) == worth


# -- mistakes ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ({"path": "nowhere.jsonl"}, "there is no dataset nowhere.jsonl"),
        ({"prompt": "quastion"}, "has no column 'quastion'; it has question, answer, level"),
        ({"columns": ["hint"]}, "has no column 'hint'"),
        ({"answer": "answer.value"}, "has no column 'answer.value'; answer has 1"),
        (
            {"filters": [{"column": "level", "equal": 1}]},
            r"filters\.0\.equal: there is no such key; did you mean filters.0.equals",
        ),
        ({"filters": [{"column": "level", "equals": 7}]}, "the filters leave none of the 10 rows"),
        ({"template": "{{ question"}, "is not valid"),
        ({"scoring": "exact"}, "no scoring is called 'exact'; there are exact_match"),
        ({"curriculum": "nowhere:stages"}, "module 'nowhere' cannot be imported"),
    ],
)
def test_mistakes_in_the_configuration_are_one_sentence(sums: str, args: dict[str, Any], sentence: str):
    given = {"path": sums, "prompt": "question", **args}
    with pytest.raises(ConfigError, match=sentence):
        build_agent(EnvironmentConfig(type="dataset", args=given), seed=0)


def test_an_empty_file_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="has no rows"):
        agent(write(tmp_path / "none.jsonl", []))


def test_a_row_that_is_no_object_is_named(tmp_path: Path):
    broken = agent(write(tmp_path / "broken.jsonl", [SUMS[0], [1]]), shuffle=False)
    with pytest.raises(ValueError, match=r"\.jsonl:2 is not a JSON object"):
        broken.task(1)


# -- optional libraries -----------------------------------------------------------------------------------------------
def test_a_parquet_file_is_a_table_as_well(tmp_path: Path):
    pyarrow = pytest.importorskip("pyarrow", reason="the optional package pyarrow is not installed")
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(SUMS), tmp_path / "sums.parquet")
    posed = agent(str(tmp_path / "sums.parquet"), shuffle=False, columns=["level"]).task(2)
    assert (posed.prompt, posed.answer, posed.data) == ("2+1=", "3", {"level": 2})


def test_a_folder_that_datasets_saved_is_opened(tmp_path: Path):
    datasets = pytest.importorskip("datasets", reason="the optional package datasets is not installed")
    table = datasets.Dataset.from_list(SUMS)
    table.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": table, "test": table.select([4])}).save_to_disk(tmp_path / "several")
    assert agent(str(tmp_path / "one"), shuffle=False).task(1).prompt == "1+1="
    assert agent(str(tmp_path / "several"), split="test").task(7).answer == "5"
    with pytest.raises(ConfigError, match="no split 'validation'"):
        agent(str(tmp_path / "several"), split="validation")
