"""A loss of the user's own: it is given what it names, and reports what every loss does."""

from typing import Any

import pytest
import torch
from torch import Tensor

from async_rl.errors import ConfigError
from learner.losses.aggregation import StepCounts, count
from learner.losses.config import PolicyLossConfig
from learner.losses.custom import OwnLoss
from learner.losses.functions import Loss, policy_loss, sft_loss
from learner.objective import Objective


def given() -> dict[str, Any]:
    behaviour = torch.tensor([-0.5, -1.5, 0.0, -2.0])
    mask, cu_seqlens = torch.tensor([1, 1, 0, 1]), torch.tensor([0, 3, 4])
    return {
        "current": torch.tensor([-0.6, -1.0, 0.0, -2.5], requires_grad=True),
        "behaviour": behaviour,
        "advantages": torch.tensor([1.0, 1.0, 0.0, -1.0]),
        "mask": mask,
        "cu_seqlens": cu_seqlens,
        "ages": torch.tensor([0, 1, 0, 2]),
        "group_ids": torch.tensor([0, 0]),
        "normaliser": count(mask=mask, cu_seqlens=cu_seqlens),
    }


def importance(current: Tensor, behaviour: Tensor, advantages: Tensor, mask: Tensor, normaliser: StepCounts) -> Tensor:
    return -((current - behaviour).exp() * advantages * mask).sum() / normaliser.tokens


def test_a_loss_written_anew_is_the_one_we_ship() -> None:
    ours = PolicyLossConfig.model_validate({"surrogate": "importance"})
    made = []
    for loss in (OwnLoss.of(importance), Objective(policy_loss=ours).loss):
        row = given()
        found = loss(**row)
        found.loss.backward()
        made.append((found, row["current"].grad))
    (own, own_gradient), (shipped, gradient) = made
    torch.testing.assert_close(own.loss, shipped.loss)
    torch.testing.assert_close(own_gradient, gradient)
    assert own.metrics == pytest.approx(shipped.metrics)


def test_what_it_returns_may_be_a_loss_with_totals() -> None:
    def halved(current: Tensor, behaviour: Tensor, advantages: Tensor, mask: Tensor, cu_seqlens: Tensor, **_: Any) -> Loss:
        config = PolicyLossConfig.model_validate({"trust_mask": {"type": "tv", "high": 0.1}})
        return policy_loss(
            config, current=current, behaviour=behaviour, advantages=advantages / 2, mask=mask, cu_seqlens=cu_seqlens
        )

    own = OwnLoss.of(halved)
    assert own.takes == {"current", "behaviour", "advantages", "mask", "cu_seqlens"}
    assert own(**given()).metrics["masked_frac"] > 0


def test_totals_of_another_kind_are_replaced() -> None:
    found = OwnLoss.of(sft_loss)(**given())
    assert found.metrics["loss"] == pytest.approx((0.6 + 1.0 + 2.5) / 3)
    assert found.metrics["tokens"] == 3


def test_the_learner_computes_what_a_loss_names() -> None:
    def curious(current: Tensor, reference: Tensor, entropy: Tensor, proximal: Tensor, extra: float = 0.5) -> Tensor:
        return (current - reference - proximal + extra * entropy).sum()

    objective = Objective.model_validate({"own_loss": curious})
    assert objective.needs_reference
    assert objective.needs_entropy
    assert objective.needs_proximal
    plain = Objective.model_validate({"own_loss": importance})
    assert not any((plain.needs_reference, plain.needs_entropy, plain.needs_proximal))


@pytest.mark.parametrize(
    ("loss", "sentence"),
    [
        (
            lambda current, behavior: current.sum(),
            "asks for 'behavior', which is not an argument of losses; did you mean 'behaviour'",
        ),
        (lambda current: 3.0, "fails on a few tokens .TypeError: a loss must be a scalar tensor, not 3.0"),
        (lambda current: current, r"must be a scalar tensor, not one of shape \[6\]"),
        (lambda current: current.detach().sum(), "fails on a few tokens .RuntimeError: .* does not require grad"),
        (lambda current, mask: current[mask].no_such_thing, "fails on a few tokens"),
        (5, "5 is not a function, but int"),
        ("builtins:type", "builtins:type has no readable signature"),
    ],
)
def test_a_mistake_is_found_before_anything_is_trained(loss: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        OwnLoss.of(loss)
