"""Losses and statistics of routers are those of plain formulas, with their gradients."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from async_rl.config.learner import ExpertsConfig
from async_rl.errors import ConfigError
from async_rl.megatron import parallel
from async_rl.megatron.experts.routing import ObservedRouter, RouterObserver
from async_rl.megatron.model import ComputeOptions, Recompute, build_chunks, forward_packed, pack
from learner.model import check_router_losses
from tests.unit.async_rl.megatron.expert_rank import CPU, SHAPE, sequences

FILLER = torch.tensor([3])
ROWS = [sequences(), [sequences()[1]], [FILLER]]
"""Of 14, 5 and 1 tokens; the last one only fills up a schedule."""
TOKENS = 19
BALANCING, Z = 0.7, 0.05


def model(recompute: Recompute = "none") -> nn.Module:
    parallel.initialize(device=CPU)
    (chunk,) = build_chunks(SHAPE, device=CPU, dtype=torch.float32, seed=5, compute=ComputeOptions(recompute=recompute))
    return chunk


def main_loss(of: nn.Module) -> Tensor:
    return torch.stack([forward_packed(of, *pack(row)).logits().logsumexp(dim=-1).sum() for row in ROWS]).sum()


def gradients(of: nn.Module) -> dict[str, Tensor]:
    return {name: each.grad for name, each in of.named_parameters() if each.grad is not None}


@pytest.fixture(scope="module")
def plain() -> tuple[dict[str, Tensor], dict[str, float]]:
    """Gradients and statistics from the inputs of the router of a model that nobody observes."""
    assert SHAPE.experts is not None
    built, seen = model(), []
    (router,) = (each for each in built.modules() if isinstance(each, ObservedRouter))
    router.register_forward_hook(lambda _router, given, _result: seen.append(given[0].view(-1, SHAPE.hidden)))
    loss, number, chosen, probable, spread, squared = main_loss(built), SHAPE.experts.number, 0.0, 0.0, 0.0, 0.0
    for hidden in seen[:2]:
        logits = hidden @ router.weight.T
        p = logits.softmax(dim=-1)
        picked = nn.functional.one_hot(p.topk(SHAPE.experts.per_token).indices, number).sum(dim=1).float()
        f = picked.mean(dim=0) / SHAPE.experts.per_token
        z = logits.logsumexp(dim=-1).square()
        loss = loss + BALANCING * len(p) / TOKENS * number * (f * p.mean(dim=0)).sum() + Z * z.sum() / TOKENS
        chosen, probable = chosen + picked.sum(dim=0), probable + p.detach().sum(dim=0)
        spread, squared = spread - float((p * p.log()).detach().sum()), squared + float(z.detach().sum())
    loss.backward()
    assert isinstance(chosen, Tensor)
    shares = chosen / chosen.sum()
    return gradients(built), {
        "experts/imbalance_max": float(shares.max() * number),
        "experts/imbalance_mean": float(shares.max() * number),
        "experts/idle": float((chosen == 0).float().mean()),
        "experts/entropy": spread / TOKENS,
        "experts/balancing_loss": float(number * (shares * probable / TOKENS).sum()),
        "experts/z_loss": squared / TOKENS,
    }


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_gradients_and_statistics_are_those_of_the_formulas(
    plain: tuple[dict[str, Tensor], dict[str, float]], recompute: Recompute
) -> None:
    built = model(recompute)
    losses = ExpertsConfig(balancing_loss=BALANCING, z_loss=Z)
    observer = RouterObserver(built, SHAPE, losses, gradient_scale=2.0)
    observer.begin(TOKENS)
    (2 * main_loss(built)).backward()  # what Megatron halves later
    with torch.no_grad():
        main_loss(built)  # is not counted
    expected, statistics = plain
    assert gradients(built).keys() == expected.keys()
    for name, gradient in gradients(built).items():
        torch.testing.assert_close(gradient / 2, expected[name], atol=1e-5, rtol=1e-4, msg=name)
    assert observer.ended().metrics == pytest.approx(statistics, rel=1e-5)
    assert 1 < statistics["experts/imbalance_max"] <= 4
    assert 0 < statistics["experts/entropy"] < math.log(4)


def test_without_coefficients_gradients_are_those_of_the_model_alone() -> None:
    alone, observed = model(), model()
    observer = RouterObserver(observed, SHAPE, ExpertsConfig(), gradient_scale=1.0)
    observer.begin(TOKENS)
    for each in (alone, observed):
        main_loss(each).backward()
    expected = gradients(alone)
    assert all(torch.equal(gradient, expected[name]) for name, gradient in gradients(observed).items())
    assert observer.ended().metrics["experts/balancing_loss"] > 0


def test_losses_of_routers_need_a_model_with_routers() -> None:
    check_router_losses(ExpertsConfig(), replace(SHAPE, experts=None))
    check_router_losses(ExpertsConfig(z_loss=0.1), SHAPE)
    with pytest.raises(ConfigError, match=r"learner\.experts: the model has no experts"):
        check_router_losses(ExpertsConfig(balancing_loss=0.1), replace(SHAPE, experts=None))
