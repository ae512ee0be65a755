"""Log-probabilities and entropies from hidden states, in chunks of tokens, against log_softmax of whole logits in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor

from async_rl.megatron import parallel
from async_rl.megatron.heads.logprobs import token_logprobs, token_logprobs_and_entropies
from tests.support.packed_outputs import packed_output, with_logits
from tests.unit.async_rl.megatron.heads.naive import Given, scores

TOKEN = 3 * 19 * 8
"""Bytes of a token's logits in float64."""
CHUNKS = {"one chunk": 2**20, "chunks of a token": 1, "chunks of 3": 3 * TOKEN, "chunks of 200, as 128": 200 * TOKEN}
WAYS: dict[str, dict[str, Any]] = {
    "whole": {"temperature": 1.0},
    "temperature": {"temperature": 0.7},
    "truncated": {"temperature": 0.7, "top_k": 6, "top_p": 0.8},
}


@pytest.fixture(autouse=True)
def alone() -> None:
    parallel.initialize(device=torch.device("cpu"))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("tokens", [0, 1, 7, 260])
def test_values_and_gradients_are_those_of_log_softmax(tokens: int, chunks: str, way: str) -> None:
    given, how = Given.random(tokens), WAYS[way]

    def ours(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        output = packed_output(hidden, weight, vocab_size=given.vocab_size, bytes_at_once=CHUNKS[chunks])
        return token_logprobs_and_entropies(output, given.targets, **how)

    def naive(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return scores(hidden, weight, given.targets, vocab_size=given.vocab_size, **how)

    def ours_alone(hidden: Tensor, weight: Tensor) -> Tensor:
        output = packed_output(hidden, weight, vocab_size=given.vocab_size, bytes_at_once=CHUNKS[chunks])
        return token_logprobs(output, given.targets, **how)

    parts = {
        "logprobs alone": (ours_alone, lambda *g: naive(*g)[0]),
        "logprobs": (lambda *g: ours(*g)[0], lambda *g: naive(*g)[0]),
        "entropies": (lambda *g: ours(*g)[1], lambda *g: naive(*g)[1]),
        "both": (lambda *g: ours(*g)[0] + 0.3 * ours(*g)[1], lambda *g: naive(*g)[0] + 0.3 * naive(*g)[1]),
    }
    for part, (found, wanted) in parts.items():
        for left, right in zip(given.gradients(found), given.gradients(wanted), strict=True):
            torch.testing.assert_close(left, right, msg=lambda text, part=part: f"{part}: {text}")


@pytest.mark.parametrize("bytes_at_once", [1, 2**20])
def test_both_are_differentiated_in_one_pass(bytes_at_once: int) -> None:
    given = Given.random(5)

    def both(hidden: Tensor, weight: Tensor) -> Tensor:
        output = packed_output(hidden, weight, vocab_size=given.vocab_size, bytes_at_once=bytes_at_once)
        return torch.stack(token_logprobs_and_entropies(output, given.targets, temperature=0.7))

    leaves = [each.clone().requires_grad_() for each in (given.hidden, given.weight)]
    assert torch.autograd.gradcheck(both, leaves)


def test_what_is_not_trained_has_no_gradient() -> None:
    given = Given.random(9)

    def found(hidden: Tensor, weight: Tensor) -> Tensor:
        return token_logprobs(
            packed_output(hidden, weight, vocab_size=given.vocab_size, bytes_at_once=4 * TOKEN), given.targets
        )

    _, of_hidden, of_weight = given.gradients(found)
    assert (of_hidden[::3] == 0).all(), "masked tokens"
    assert (of_hidden[1::3] != 0).any()
    assert (of_weight[given.vocab_size :] == 0).all(), "padding of the vocabulary"


def test_half_precision_is_multiplied_and_summed_in_float32() -> None:
    given = Given.random(40, width=64)
    hidden, weight = ((each / 8).bfloat16().requires_grad_() for each in (given.hidden, given.weight))
    exact = [each.detach().double().requires_grad_() for each in (hidden, weight)]
    found = token_logprobs(packed_output(hidden, weight, vocab_size=19, bytes_at_once=7 * 3 * 19 * 4), given.targets)
    wanted, _ = scores(exact[0], exact[1], given.targets, vocab_size=19, temperature=1.0)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, wanted.float(), atol=1e-6, rtol=1e-6)
    found.sum().backward()
    wanted.sum().backward()
    for ours, theirs in zip((hidden, weight), exact, strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert ours.grad.dtype == torch.bfloat16
        torch.testing.assert_close(ours.grad.double(), theirs.grad, atol=1e-3, rtol=2**-7)


@pytest.mark.parametrize(
    ("given", "entropy"), [(torch.zeros(19, 19), 2.944439), (300 * torch.eye(19), 0.0)], ids=["even", "certain"]
)
def test_extremes_are_finite(given: Tensor, entropy: float) -> None:
    given = given.clone().requires_grad_()
    _, entropies = token_logprobs_and_entropies(with_logits(given), torch.arange(19))
    entropies.sum().backward()
    assert entropies.tolist() == pytest.approx([entropy] * 19, abs=1e-5)
    assert given.grad is not None
    assert given.grad.abs().max() < 1e-5


def test_what_truncation_leaves_has_less_entropy() -> None:
    given = with_logits(torch.randn(12, 19, generator=torch.Generator().manual_seed(1)))
    _, whole = token_logprobs_and_entropies(given, torch.arange(12))
    _, cut = token_logprobs_and_entropies(given, torch.arange(12), top_k=3)
    assert (cut < whole).all()


def test_the_callers_tensors_survive_and_a_graph_can_be_used_twice() -> None:
    given = Given.random(6)
    hidden, weight = (each.clone().requires_grad_() for each in (given.hidden, given.weight))
    found = token_logprobs(packed_output(hidden, weight, vocab_size=19), given.targets).sum()
    first, second = (torch.autograd.grad(found, (hidden, weight), retain_graph=True) for _ in range(2))
    for left, right in zip(first, second, strict=True):
        assert torch.equal(left, right)
    assert torch.equal(hidden.detach(), given.hidden)
    assert torch.equal(weight.detach(), given.weight)
