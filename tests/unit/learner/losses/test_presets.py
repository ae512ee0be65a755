"""Every objective that we ship: it begins by saying what it is, it loads, and its gradient is a number where it must be."""

import itertools

import pytest
import torch

from learner.losses.aggregation import count
from learner.objective import load_objective, preset_names, presets_folder

NAMED = {
    "async_default", "cispo", "dapo", "decoupled_ppo", "dppo", "dr_grpo", "grpo", "gspo", "icepop", "ppo", "reinforce",
    "reinforce_pp", "rloo", "scale_rl", "tis",
}  # fmt: skip


def test_those_that_people_know_by_name_are_there() -> None:
    assert set(preset_names()) >= NAMED


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_says_what_it_is(name: str) -> None:
    first = (presets_folder() / f"{name}.yaml").read_text().splitlines()[0]
    assert first.startswith("# ")


@pytest.mark.parametrize("name", preset_names())
@pytest.mark.parametrize("mask", [[0, 1, 1, 0, 1, 0, 0, 1], [0] * 8])
def test_every_preset_has_a_loss_and_a_gradient(name: str, mask: list[int]) -> None:
    objective = load_objective(name)
    trained, cu_seqlens, group_ids = torch.tensor(mask), torch.tensor([0, 4, 6, 8]), torch.tensor([0, 0, 1])
    behaviour = -torch.tensor([0.1, 1.0, 0.5, 2.0, 0.7, 3.0, 0.2, 1.5])
    current = (behaviour + 0.01 * torch.arange(8)).requires_grad_()
    made = objective.loss(
        current=current,
        behaviour=behaviour,
        advantages=torch.tensor([1.0, 1, 1, 1, -1, -1, 0.5, 0.5]),
        mask=trained,
        cu_seqlens=cu_seqlens,
        proximal=behaviour + 0.005,
        ages=torch.ones(8, dtype=torch.int64),
        group_ids=group_ids,
        normaliser=count(mask=trained, cu_seqlens=cu_seqlens, group_ids=group_ids),
    )
    made.loss.backward()
    assert current.grad is not None
    assert torch.isfinite(made.loss)
    assert ((current.grad != 0) <= (trained != 0)).all()
    # what is good becomes likelier; a clip may stop a token, but not all of them
    moved = -current.grad * torch.tensor([1.0, 1, 1, 1, -1, -1, 1, 1])
    assert (moved >= 0).all()
    assert bool((moved > 0).any()) == bool(trained.any())


def test_no_two_presets_are_the_same() -> None:
    for one, other in itertools.combinations(preset_names(), 2):
        assert load_objective(one) != load_objective(other)


def test_the_default_is_behaviour_anchored_cispo_within_a_trust_region() -> None:
    objective = load_objective("async_default").model_dump()
    assert objective["advantages"]["scale"] == "none"
    loss = objective["policy_loss"]
    assert loss["surrogate"] == {"type": "cispo", "cap": 5.0, "floor": 0.0}
    assert loss["anchor"] == "behaviour"
    assert loss["trust_mask"] == ({"type": "tv", "high": 0.2, "low": 0.2},)
    assert loss["veto"] == {"min_ratio": 1e-4}
    assert loss["aggregation"] == {"type": "token_mean"}
    assert loss["kl"]["coefficient"] == 0


def test_only_ppo_has_a_critic() -> None:
    assert {name for name in preset_names() if load_objective(name).needs_values} == {"ppo"}
