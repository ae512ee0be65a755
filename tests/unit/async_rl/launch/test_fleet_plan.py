"""Which processes a fleet on a cluster has, and what each needs."""

import pytest

from async_rl.config import Config
from async_rl.errors import ConfigError
from async_rl.launch import fleet_plan as plan
from async_rl.supervision.processes.ranks import RankRange


def config(**sections: object) -> Config:
    return Config.model_validate(
        {"model": {"size": {"hidden": 32, "layers": 1, "heads": 2}}, "environments": [{"type": "even_digits"}], **sections}
    )


def test_ranks_are_divided_over_the_learners_machines() -> None:
    learner = plan.learner(config(learner={"parallel": {"processes": 4}}, launch={"learner_nodes": 2}), has_gpus=True)
    assert [member.name for member in learner.members] == ["learner", "learner-1"]
    assert [str(member.ranks) for member in learner.members] == ["0+2/4", "2+2/4"]
    assert all(member.resources == {"CPU": 1, "GPU": 2} for member in learner.members)


def test_ranks_that_cannot_be_divided_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"learner_nodes \(2\) must divide the learner's 3 ranks"):
        plan.learner(config(learner={"parallel": {"processes": 3}}, launch={"learner_nodes": 2}), has_gpus=False)


def test_what_is_named_replaces_what_a_process_needs_by_itself() -> None:
    given = config(worker={"engines": 2, "tensor": 2}, launch={"worker_resources": {"CPU": 8, "l40s": 1}})
    (worker,) = plan.worker(given, 3, has_gpus=True).members
    assert (worker.name, dict(worker.resources)) == ("worker-3", {"CPU": 8, "GPU": 4, "l40s": 1})
    (evaluator,) = plan.evaluator(given, has_gpus=True).members
    assert evaluator.resources == worker.resources, "it opens the same engines"
    (fewer,) = plan.worker(config(launch={"worker_resources": {"GPU": 0.5}}), 0, has_gpus=True).members
    assert fewer.resources["GPU"] == 0.5


def test_the_processes_of_a_run_are_counted_by_the_cores_that_they_ask_for() -> None:
    given = config(worker={"processes": 3}, evaluation={"every": 5}, launch={"worker_resources": {"CPU": 0.5}})
    assert [each.name for each in plan.fleet(given, has_gpus=False)] == ["buffer", "learner", *WORKERS, "evaluator"]
    assert plan.cores(given) == 3


WORKERS = ("worker-0", "worker-1", "worker-2")


@pytest.mark.parametrize(
    ("name", "index"), [("worker-0", 0), ("worker-12", 12), ("learner", None), ("learner-1", None), ("evaluator", None)]
)
def test_workers_are_known_by_their_names(name: str, index: int | None) -> None:
    assert plan.worker_index(name) == index


@pytest.mark.parametrize("text", ["8", "8+4/16", "0+4/8"])
def test_a_range_of_ranks_is_read_as_it_is_written(text: str) -> None:
    assert str(RankRange.parse(text)) == text
