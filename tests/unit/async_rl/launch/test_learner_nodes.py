"""On how many machines the learner of a cluster runs."""

import pytest
from pydantic import ValidationError

from async_rl.config import Config
from async_rl.errors import ConfigError
from async_rl.launch import fleet_plan as plan
from async_rl.launch.learner_nodes import LearnerNodes
from async_rl.launch.slurm.scripts import scripts
from async_rl.plan.learner_sizes import learner_sizes


def config(parallel: dict[str, int], **launch: object) -> Config:
    return Config.model_validate(
        {
            "model": {"size": {"hidden": 32, "layers": 2, "heads": 2}},
            "environments": [{"type": "even_digits"}],
            "learner": {"parallel": parallel},
            "launch": launch,
        }
    )


@pytest.mark.parametrize(
    ("parallel", "most", "fewest", "sizes"),
    [
        ({"processes": 4}, 4, 1, [4, 3, 2, 1]),
        ({"processes": 8}, 4, 2, [4, 3, 2]),
        ({"processes": 4}, 2, None, [2]),
        ({"tensor": 2, "processes": 4}, 4, 2, [4, 2]),  # three ranks are no two copies
        ({"tensor": 2, "pipeline": 2, "processes": 16}, 4, 1, [4, 3, 2, 1]),
        ({"expert": 2, "processes": 4}, 4, 2, [4, 2]),
    ],
)
def test_every_number_of_machines_that_holds_whole_copies_is_possible(
    parallel: dict[str, int], most: int, fewest: int | None, sizes: list[int]
) -> None:
    assert learner_sizes(config(parallel, learner_nodes=most, learner_nodes_min=fewest)) == sizes


def test_a_smallest_number_that_cannot_hold_the_model_is_refused_by_name() -> None:
    with pytest.raises(
        ConfigError, match=r"learner_nodes_min \(1\): the learner would have 1 ranks, but .* needs 2 or a multi"
    ):
        learner_sizes(config({"tensor": 2, "processes": 4}, learner_nodes=4, learner_nodes_min=1))
    with pytest.raises(ValidationError, match=r"learner_nodes_min \(3\) is more than learner_nodes \(2\)"):
        config({"processes": 2}, learner_nodes=2, learner_nodes_min=3)


def test_each_machine_has_as_many_ranks_on_fewer_machines() -> None:
    given = config({"tensor": 2, "processes": 8}, learner_nodes=4, learner_nodes_min=1)
    whole, less = plan.learner(given, has_gpus=True), plan.learner(given, has_gpus=True, nodes=3)
    assert [str(member.ranks) for member in less.members] == ["0+2/6", "2+2/6", "4+2/6"]
    assert (whole.is_elastic, less.is_elastic, len(whole.members)) == (True, True, 4)
    assert less.members[0].resources == whole.members[0].resources


def test_slurm_may_give_any_number_between_both_and_numbers_that_it_must_not_give_are_refused() -> None:
    script = scripts(config({"processes": 4}, learner_nodes=4, learner_nodes_min=2), on_gpus=())["learner"]
    assert "#SBATCH --nodes=2-4\n" in script
    with pytest.raises(ConfigError, match=r"learner_nodes_min \(2\): Slurm may give any number of nodes up to 4, but 3 cannot"):
        scripts(config({"tensor": 2, "processes": 4}, learner_nodes=4, learner_nodes_min=2), on_gpus=())


def decided(*seen: int | None, nodes: int = 4, resize_s: float = 4.0) -> list[int]:
    """The number of machines after each look, one every two seconds."""
    learner, found = LearnerNodes(sizes=[4, 2, 1], resize_s=resize_s, nodes=nodes), list[int]()
    for look, machines in enumerate(seen):
        learner = learner.after(machines, now=100.0 + 2 * look)
        found.append(learner.nodes)
    return found


def test_fewer_machines_are_taken_after_a_while_and_more_when_they_stay() -> None:
    assert decided(4, 3, 3, 3, 3) == [4, 4, 4, 2, 2]
    assert decided(2, 4, 4, 4, 4, nodes=2) == [2, 2, 2, 4, 4]
    assert decided(9, 9, 9) == [4, 4, 4]


def test_a_machine_that_comes_and_goes_moves_nothing() -> None:
    assert set(decided(1, 4, 1, 4, 1, 4, 1, 4, nodes=1)) == {1}
    assert set(decided(3, 3, 4, 3, 3, 4)) == {4}
    assert decided(2, 2, 1, 1, 1) == [4, 4, 4, 4, 1], "another number is waited for anew"


def test_a_learner_without_any_machine_or_one_that_is_being_placed_waits() -> None:
    assert set(decided(0, 0, 0, 0)) == {4}
    assert set(decided(1, 1, None, 1, 1, None)) == {4}


def test_without_a_wait_the_second_look_decides() -> None:
    assert decided(1, 1, resize_s=0.0) == [4, 1]
