"""The entropy of the choice that a target was sampled from, against plain log_softmax in float64."""

import pytest
import torch
from torch import Tensor

from async_rl.megatron import parallel
from async_rl.megatron.logprobs import token_logprobs_and_entropies
from async_rl.megatron.truncation import truncate


@pytest.fixture(autouse=True)
def alone() -> None:
    parallel.initialize(device=torch.device("cpu"))


def logits(spread: float = 6.0) -> Tensor:
    return (spread * torch.randn(12, 19, generator=torch.Generator().manual_seed(1), dtype=torch.float64)).requires_grad_()


TARGETS = torch.arange(12)


def test_entropy_and_its_gradient_are_those_of_log_softmax() -> None:
    given, plain = logits(), logits()
    weights = torch.linspace(-1, 1, 12, dtype=torch.float64)
    logprobs, entropies = token_logprobs_and_entropies(given, TARGETS, vocab_size=17, temperature=0.7)
    log_p = (plain[:, :17] / 0.7).log_softmax(-1)
    expected = -(log_p.exp() * log_p).sum(-1)
    chosen = log_p[TARGETS, TARGETS]
    torch.testing.assert_close(entropies, expected)
    torch.testing.assert_close(logprobs, chosen)

    (weights * entropies + 0.3 * logprobs).sum().backward()
    (weights * expected + 0.3 * chosen).sum().backward()
    torch.testing.assert_close(given.grad, plain.grad)
    assert torch.autograd.gradcheck(lambda x: token_logprobs_and_entropies(x, TARGETS, vocab_size=17), (logits(),))


@pytest.mark.parametrize(
    ("given", "entropy"), [(torch.zeros(19, 19), 2.944439), (300 * torch.eye(19), 0.0)], ids=["even", "certain"]
)
def test_extremes_are_finite(given: Tensor, entropy: float) -> None:
    given = given.clone().requires_grad_()
    _, entropies = token_logprobs_and_entropies(given, torch.arange(19), vocab_size=19)
    entropies.sum().backward()
    assert entropies.tolist() == pytest.approx([entropy] * 19, abs=1e-5)
    assert given.grad is not None
    assert given.grad.abs().max() < 1e-5


def test_what_truncation_leaves_has_less_entropy() -> None:
    given = logits(1.0)
    _, whole = token_logprobs_and_entropies(given, TARGETS, vocab_size=19)
    _, cut = token_logprobs_and_entropies(given, TARGETS, vocab_size=19, top_k=3)
    kept = truncate(given.detach(), torch.full_like(TARGETS, 3), torch.ones(12), always=TARGETS).softmax(-1)
    torch.testing.assert_close(cut, torch.special.entr(kept).sum(-1))
    assert (cut < whole).all()
