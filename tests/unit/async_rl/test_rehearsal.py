"""The small run of `async-rl rehearse` is a valid one, whatever the large one asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from async_rl.config import Config
from async_rl.config.learner import OwnCritic, ParallelConfig
from async_rl.config.training import METHODS, Distillation, Method, SupervisedTraining
from async_rl.launch.rehearsal import SmallModel, divided, rehearsed, rehearsed_training

SIZE = {"size": {"hidden": 64, "layers": 2, "heads": 4}}
FOLDER = Path("/runs/rehearsal")


def small_run(**sections: Any) -> Config:
    given: dict[str, Any] = {"model": SIZE, "environments": [{"type": "counting", "max_share": 0.5}, {"type": "even_digits"}]}
    return rehearsed(Config.model_validate(given | sections), None, FOLDER, steps=2, processes=2)[0]


@pytest.mark.parametrize(
    "sections",
    [
        {"batch": {"groups_per_step": 1, "group_size": 6}},
        {"batch": {"groups_per_step": 8, "minibatches": 4, "tokens_per_step": 100_000}},
        {"replay": {"max_uses": 3, "samples_per_insert": 2.0, "error_buffer": 40.0, "min_groups": 8}},
        {"staleness": {"max_age": 8, "pace": 4.0}, "wire": {"push_every_steps": 4}},
        {"staleness": {"max_age": 0}},
        {"wire": {"host": "10.0.0.1", "insecure": True}, "redis": {"url": "redis://10.0.0.1:6379", "insecure": True}},
        {"worker": {"processes": 4, "engines": 2, "tensor": 2}, "evaluation": {"every": 7, "samples": 8, "k": [8]}},
    ],
)
def test_a_run_becomes_small_and_keeps_to_this_machine(sections: dict[str, Any]) -> None:
    small = small_run(**sections)
    assert (small.learner.steps, small.batch.groups_per_step, small.worker.processes) == (2, 2, 1)
    assert (small.wire.host, small.redis.url, small.device) == ("127.0.0.1", "", "cpu")
    assert small.run_folder == FOLDER


def test_games_keep_their_tables_whole() -> None:
    assert small_run(batch={"group_size": 6}).batch.group_size == 6


def test_pretrained_models_become_the_small_one_and_a_critic_begins_with_the_policy() -> None:
    critic = {"type": "own", "name": "large/critic", "warmup_steps": 5, "optimizer": {"offload": True}}
    config = Config.model_validate(
        {
            "model": {"name": "large/model"},
            "tokenizer": {"type": "characters"},
            "environments": [{"type": "counting"}],
            "learner": {"critic": critic},
        }
    )
    model = SmallModel(folder=Path("/small"), tokenizer=Path("/tokenizer"), positions=2048)
    small, _ = rehearsed(config, model, FOLDER, steps=2, processes=2)
    assert (small.model.folder, small.model.name, small.model.max_sequence) == (Path("/small"), "", 2048)
    assert small.tokenizer == config.tokenizer
    found = small.learner.critic
    assert isinstance(found, OwnCritic)
    assert (found.folder, found.name, found.warmup_steps, found.optimizer.offload) == (Path("/small"), "", 0, False)


@pytest.mark.parametrize("method", METHODS)
def test_a_training_becomes_small_and_reads_a_few_rows(method: Method) -> None:
    rows = "configs/train/counting_pairs" if METHODS[method].compares else "configs/train/counting"
    config = METHODS[method].model_validate(
        {
            "model": {"name": "large/model"},
            "tokenizer": {"type": "characters"},
            "data": {"path": f"{rows}.jsonl", "held_out": {"path": f"{rows}_held_out.jsonl"}},
            "batch": {"examples_per_step": 64, "bin_tokens": 65536},
            "learner": {"epochs": 3, "parallel": {"tensor": 8}, "optimizer": {"offload": True}},
            **({"distill": {"teacher": {"name": "large/teacher"}}} if method == "distill" else {}),
        }
    )
    model = SmallModel(folder=Path("/small"), tokenizer=Path("/tokenizer"), positions=2048)
    small, said = rehearsed_training(config, model, FOLDER, steps=2, processes=2)
    assert (small.model.folder, small.model.name, small.run_folder, small.device) == (Path("/small"), "", FOLDER, "cpu")
    assert (small.steps(10**6), small.batch.examples_per_step, small.learner.parallel.tensor) == (2, 4, 2)
    assert (small.data.path, said) == (config.data.path, [])
    assert small.data.held_out is not None
    assert (small.data.held_out.examples, small.learner.optimizer.offload) == (4, False)
    if isinstance(small, Distillation):
        assert small.distill.teacher.folder == Path("/small")


def test_the_same_rows_stand_in_for_several_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    data = {"datasets": [{"path": "far/one"}, {"path": "far/two", "weight": 2.0}], "held_out": {"path": "far/three"}}
    config = SupervisedTraining.model_validate({"model": SIZE, "tokenizer": {"type": "characters"}, "data": data})
    small, said = rehearsed_training(config, None, FOLDER, steps=2, processes=1)
    assert [(each.label, each.weight) for each in small.data.datasets] == [("one", 1.0), ("two", 2.0)]
    assert {each.path for each in small.data.datasets} == {"configs/train/counting.jsonl"}
    assert small.data.held_out is not None
    assert small.data.held_out.path == "configs/train/counting_held_out.jsonl"
    assert len(said) == 3


@pytest.mark.parametrize(
    ("wanted", "processes", "found"),
    [
        ({"tensor": 8, "sequence": True, "expert": 8}, 2, {"tensor": 2, "sequence": True}),
        ({"tensor": 8, "sequence": True, "expert": 8}, 4, {"tensor": 2, "sequence": True, "expert": 2}),
        ({"pipeline": 4, "virtual_stages": 2}, 2, {"pipeline": 2}),
        ({"processes": 8}, 2, {"processes": 2}),
        ({"tensor": 8}, 1, {}),
    ],
)
def test_a_layout_is_divided_down_to_the_processes(wanted: dict[str, Any], processes: int, found: dict[str, Any]) -> None:
    assert divided(ParallelConfig.model_validate(wanted), processes) == ParallelConfig.model_validate(found)
