"""Evaluating without a model: what is played, what is counted, what is written, and which step comes next."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from async_rl.cli.eval import EVAL
from async_rl.cli.grammar import read
from async_rl.config import Config, ModelConfig, ModelSize, RunConfig
from async_rl.config.evaluation import EvaluationConfig, HuggingFacePolicy, OpenAIPolicy
from async_rl.config.loading import load
from async_rl.config.rollout import EnvironmentConfig
from async_rl.errors import CheckpointError, ConfigError
from async_rl.protocols import EpisodeContext, GenerationArgs, Prompt
from async_rl.telemetry import configure_logs
from async_rl.testing import ScriptedInference
from async_rl.types import Completion, Message, Rollout, Task, ToolCall, VersionRecord
from rollout_workers.adapters.function import Client, function_agent
from rollout_workers.chat.tool_calls import parse
from rollout_workers.evaluation.evaluator import Evaluator, TaskResult, open_environments
from rollout_workers.evaluation.live import next_due
from rollout_workers.evaluation.measures import measure
from rollout_workers.evaluation.report import EvaluatedModel, EvaluationReport
from rollout_workers.evaluation.subject import HuggingFaceFolder, LiveRun, PolicySubject, find_subject
from rollout_workers.inference.interface import Inference
from rollout_workers.inference.scripted import Scripted
from rollout_workers.inference.transcript import Transcript


def config_of(*environments: EnvironmentConfig, folder: Path = Path("runs"), **evaluation: object) -> Config:
    return Config(
        run=RunConfig(name="r", folder=folder),
        model=ModelConfig(size=ModelSize(hidden=8, layers=1, heads=1)),
        environments=environments or (COUNTING,),
        evaluation=EvaluationConfig.model_validate(evaluation),
        policies={"judge": HuggingFacePolicy(type="hf", folder=Path("somewhere"))},
    )


COUNTING = EnvironmentConfig(type="counting", args={"length": 4})
HELD_OUT = EnvironmentConfig(type="even_digits", evaluation_only=True, args={"max_tokens": 4})


async def results_of(config: Config, inference: Inference | ScriptedInference) -> list[TaskResult]:
    async with open_environments(config) as seats:
        return await Evaluator(seats, config, inference, policies={}).evaluate()


class HalfRight(Inference):
    """Greedy answers are right; of the others every second one; what breaks breaks."""

    def __init__(self) -> None:
        self._scripted = ScriptedInference(counted)
        self.tokenizer = self._scripted.tokenizer
        self.temperatures: list[float | None] = []

    async def _generate(self, prompt: Prompt, args: GenerationArgs) -> Completion:
        self.temperatures.append(args.temperature)
        wrong = args.temperature != 0 and len(self.temperatures) % 2
        self._scripted = ScriptedInference((lambda _: "zzzz") if wrong else counted)
        return await self._scripted.generate(prompt, args)


def counted(text: str) -> str:
    digit = int(text[0])
    return "".join(str((digit + step) % 10) for step in range(1, 5))


async def test_every_environment_is_played_also_one_that_is_never_trained() -> None:
    config = config_of(COUNTING, HELD_OUT, tasks=3, samples=2, k=(1, 2))
    results = await results_of(config, Scripted(["2468", "1357"]))
    assert [result.task.environment for result in results] == ["counting"] * 3 + ["even_digits"] * 3
    assert all(len(result.samples) == 2 and result.greedy is not None for result in results)
    chosen = await results_of(config_of(COUNTING, HELD_OUT, environments=("even_digits",), tasks=1), Scripted(["2"]))
    assert [result.task.environment for result in chosen] == ["even_digits"]


async def test_tasks_are_others_than_those_trained_on_and_always_the_same() -> None:
    first, again = [await results_of(config_of(tasks=8), Scripted(["1"])) for _ in range(2)]
    assert [result.task for result in first] == [result.task for result in again]
    assert all("/1000003/" in result.task.key for result in first)


async def test_the_greedy_pass_is_greedy_and_apart() -> None:
    model = HalfRight()
    config = config_of(tasks=5, samples=4, k=(1, 4), episodes_in_flight=1)
    results = await results_of(config, model)
    assert model.temperatures.count(0) == 5
    assert {result.greedy.reward for result in results if result.greedy is not None} == {1.0}
    (measures,) = measure(results, config.evaluation)
    estimates = {name: estimate.mean for name, estimate in measures.estimates.items()}
    assert estimates["pass@1"] == pytest.approx(0.5, abs=0.11)
    assert (estimates["pass@4"], estimates["greedy"], estimates["greedy_pass@1"]) == (1.0, 1.0, 1.0)
    assert estimates["mean@4"] == pytest.approx(estimates["pass@1"])
    assert measures.metrics["eval/counting/failed"] == 0


ROWS = [("1=", "2345"), ("2=", "3456"), ("3=", "wrong")]


@function_agent(tasks=ROWS)
async def table(task: Task, client: Client) -> float:
    return float(await client.ask(task.prompt) == task.answer)


def dataset(folder: Path, name: str, rows: int = 3) -> EnvironmentConfig:
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{row}=", "answer": f"{row + 1}"}) + "\n" for row in range(rows)))
    return EnvironmentConfig(type="dataset", name=name, args={"path": str(path)})


TABLE = EnvironmentConfig(type=f"{__file__}:table")


@pytest.mark.parametrize("asked", [32, 3, "all", {"table": "all"}])
async def test_no_row_of_a_table_counts_twice(asked: object, capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs("test")
    config = config_of(TABLE, tasks=asked, samples=2)
    results = await results_of(config, ScriptedInference(counted))
    assert [result.task.prompt for result in results] == ["1=", "2=", "3="]
    (measures,) = measure(results, config.evaluation)
    right = measures.estimates["pass@1"]
    assert (right.tasks, round(right.low, 2), round(right.high, 2)) == (3, 0.21, 0.94)
    assert measures.metrics["eval/table/tasks"] == 3
    assert measures.metrics["eval/table/pass@1_low"] == right.low
    told = "environment 'table' has 3 different tasks of the 32 asked for: all are evaluated"
    assert (told in capsys.readouterr().err) == (asked == 32)


async def test_each_environment_may_have_a_number_of_its_own(tmp_path: Path) -> None:
    config = config_of(
        COUNTING, TABLE, dataset(tmp_path, "long", 40), samples=1, greedy=False, tasks={"counting": 2, "table": 1}
    )
    counts = Counter(result.task.environment for result in await results_of(config, ScriptedInference(counted)))
    assert counts == {"counting": 2, "table": 1, "long": 32}
    whole = config_of(dataset(tmp_path, "long", 40), samples=1, greedy=False, tasks="all")
    keys = [result.task.key for result in await results_of(whole, ScriptedInference(counted))]
    assert sorted(keys) == sorted({f"long/train/{row}" for row in range(40)})


async def test_a_mix_of_tables_is_evaluated_whole(tmp_path: Path) -> None:
    members = [{**dataset(tmp_path, name, rows).model_dump(), "weight": weight} for name, rows, weight in MEMBERS]
    mix = EnvironmentConfig(type="multi_task", name="mix", args={"environments": members})
    for tasks, expected in (("all", {"mix.few": 3, "mix.many": 17}), (1000, {"mix.few": 3, "mix.many": 17})):
        results = await results_of(config_of(mix, tasks=tasks, samples=1, greedy=False), ScriptedInference(counted))
        assert Counter(result.task.environment for result in results) == expected


MEMBERS = (("few", 3, 3.0), ("many", 17, 1.0))


async def test_what_never_ends_cannot_be_evaluated_whole() -> None:
    with pytest.raises(ConfigError, match=r"`all`, but the tasks of environment 'counting' have no end: give a number"):
        await results_of(config_of(tasks="all"), Scripted(["1"]))


@pytest.mark.parametrize(
    ("written", "sentence"),
    [
        ("some", "evaluation.tasks (command line): should be a whole number or 'all' or a mapping, but it is 'some'"),
        ("{counting: 0}", "evaluation.tasks.counting (command line): should be greater than 0 or 'all', but it is 0"),
        ("{chess: all}", "evaluation.tasks names 'chess', but the environments are ['counting']"),
    ],
)
def test_a_wrong_number_of_tasks_is_one_sentence(tmp_path: Path, written: str, sentence: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: {size: {hidden: 8, layers: 1, heads: 1}}\nenvironments: [{type: counting}]\n")
    with pytest.raises(ConfigError) as refused:
        load(["@", str(path), "--evaluation.tasks", written])
    assert sentence in str(refused.value)


@dataclass(kw_only=True)
class Breaks:
    """Every second episode has no reward."""

    name: str = ""
    seed: int = 0

    def task(self, index: int) -> Task:
        if self.seed == 13:
            raise KeyError("no such row")
        return Task(key=f"{self.name}/{index}", environment=self.name, prompt="1=")

    async def rollout(self, task: Task, inference: Inference, context: EpisodeContext) -> Rollout:
        completion = await inference.generate(task.prompt)
        if completion.text == "broken":
            raise OSError("the sandbox is gone")
        return Rollout(samples=(), reward=float(completion.text), status="ok", conversation=())  # pyright: ignore[reportArgumentType]


BREAKS = EnvironmentConfig(type=f"{__file__}:Breaks", name="breaks")


async def test_a_broken_episode_is_no_wrong_answer(tmp_path: Path) -> None:
    config = config_of(BREAKS, folder=tmp_path, tasks=2, samples=4, k=(1, 4), greedy=False, episodes_in_flight=1)
    results = await results_of(config, Scripted(["1", "broken"]))
    (measures,) = measure(results, config.evaluation)
    assert (measures.failed, measures.episodes) == (4, 8)
    assert measures.estimates["pass@1"].mean == 1.0
    assert "pass@4" not in measures.estimates, "two answers cannot say what four would"
    report = EvaluationReport(
        evaluated=EvaluatedModel(name="e", title="Nothing much"), settings=config.evaluation, results=results
    )
    page = report.write(tmp_path).read_text()
    assert "| breaks | 2 | 1.000 [1.000, 1.000] | 1.000 [0.342, 1.000] |" in page
    assert "| breaks/1 | 1= | 2/2 | 1 failed 1 failed |" in page
    head, first, _ = map(json.loads, (tmp_path / "e.jsonl").read_text().splitlines())
    assert head["environments"]["breaks"]["pass@1"]["mean"] == 1.0
    assert first["samples"][1]["failure"].startswith("environment: OSError: the sandbox is gone")
    assert first["samples"][1]["reward"] is None


async def test_a_model_that_only_fails_is_still_reported(tmp_path: Path) -> None:
    config = config_of(BREAKS, tasks=1, samples=1)
    results = await results_of(config, Scripted(["broken"]))
    report = EvaluationReport(
        evaluated=EvaluatedModel(name="e", title="All broken"), settings=config.evaluation, results=results
    )
    assert "2/2" in report.write(tmp_path).read_text()
    metrics = {"failed": 1.0, "truncated": 0.0, "length": 0.0, "tasks": 1}
    assert report.metrics == {f"eval/breaks/{name}": value for name, value in metrics.items()}


async def test_an_environment_that_cannot_pose_its_tasks_is_named() -> None:
    with pytest.raises(ConfigError, match=r"'breaks' cannot pose task 0: KeyError: 'no such row'"):
        await results_of(config_of(BREAKS, seed=13), Scripted(["1"]))


async def test_a_script_goes_round_and_writes_tool_calls() -> None:
    call = ToolCall(name="add", arguments='{"a": 1}')
    script = Scripted([Message(role="assistant", content="so", tool_calls=(call,)), "2"], tokenizer=Transcript())
    said = [(await script.generate("1=")).text for _ in range(3)]
    assert parse(said[0])[1] == (ToolCall(name="add", arguments='{"a": 1}'),)
    assert said[1:] == ["2", said[0]]


# -- what is evaluated --------------------------------------------------------------------------------------------------


def test_one_word_says_what_is_evaluated(tmp_path: Path) -> None:
    config = config_of(folder=tmp_path)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    assert find_subject("live", config) == LiveRun()
    assert find_subject("judge", config) == PolicySubject(name="judge", config=config.policies["judge"])
    assert find_subject("http://host:8000/v1", config) == PolicySubject(
        name="host:8000-v1", config=OpenAIPolicy(url="http://host:8000/v1")
    )
    assert find_subject(str(tmp_path / "hf"), config) == HuggingFaceFolder(path=tmp_path / "hf")


def test_what_cannot_be_evaluated_is_one_sentence(tmp_path: Path) -> None:
    config = config_of(folder=tmp_path)
    with pytest.raises(ConfigError, match=r"no folder .*nowhere with a checkpoint .*no name under policies \(judge\)"):
        find_subject("nowhere", config)
    with pytest.raises(ConfigError, match=r"there is no checkpoint to evaluate: .*checkpoints holds none yet"):
        find_subject("", config)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "manifest.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"manifest.json cannot be read"):
        find_subject(str(tmp_path / "broken"), config)


def test_the_word_may_stand_anywhere() -> None:
    def split(*words: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        line = read(EVAL, words)
        return line.operands, line.config

    assert split("live", "@", "run.yaml") == (("live",), ("@", "run.yaml"))
    assert split("@", "run.yaml", "--run.name", "r", "folder") == (("folder",), ("@", "run.yaml", "--run.name", "r"))
    assert split("@run.yaml", "--run.name=r") == ((), ("@run.yaml", "--run.name=r"))
    with pytest.raises(ConfigError, match=r"eval takes no operand 'b'"):
        split("a", "@", "run.yaml", "b")


# -- when ---------------------------------------------------------------------------------------------------------------


def at(step: int, timeline: str = "a") -> VersionRecord:
    return VersionRecord(version=step + 5, timeline=timeline, step=step, digest="")


@pytest.mark.parametrize(
    ("live", "last", "due"),
    [
        (None, None, 0),
        (at(0), None, 0),
        (at(7), None, 10),
        (at(0), at(0), 10),
        (at(17), at(10), 20),
        (at(31), at(12), 20),
        (at(20, "b"), at(30), 30),
        (at(15, "b"), at(30), 20),
    ],
    ids=["nothing yet", "from the start", "joined late", "next", "on the way", "was slow", "resumed", "resumed further back"],
)
def test_which_step_is_due(live: VersionRecord | None, last: VersionRecord | None, due: int) -> None:
    assert next_due(live, last, 10) == due


def test_the_configurations_of_the_documentation_are_right() -> None:
    page = Path("docs/evaluation.md").read_text()
    examples = [block.partition("```")[0] for block in page.split("```yaml\n")[1:]]
    assert len(examples) == 3
    for example in examples:
        changes = yaml.safe_load(example)
        assert Config.model_validate({**config_of().model_dump(), **changes})
