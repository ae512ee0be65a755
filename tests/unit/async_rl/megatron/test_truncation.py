"""Top-k and top-p: what is left, how its probabilities change with the logits, and what the learner refuses."""

import pytest
import torch
from pydantic import ValidationError

from async_rl.config import Config
from async_rl.megatron.logprobs import token_logprobs
from async_rl.megatron.parallel import initialize
from async_rl.megatron.truncation import ROWS_AT_ONCE, truncate

PROBABILITIES = [0.05, 0.4, 0.1, 0.25, 0.2]


@pytest.mark.parametrize(
    ("top_k", "top_p", "left"),
    [
        (0, 1.0, {0, 1, 2, 3, 4}),
        (1, 1.0, {1}),
        (2, 1.0, {1, 3}),
        (99, 1.0, {0, 1, 2, 3, 4}),
        (0, 0.01, {1}),
        (0, 0.39, {1}),
        (0, 0.41, {1, 3}),
        (0, 0.66, {1, 3, 4}),
        (0, 0.99, {0, 1, 2, 3, 4}),
        (2, 0.61, {1}),  # of the two, the likeliest holds 0.4 / 0.65
        (2, 0.62, {1, 3}),
    ],
)
def test_what_is_left(top_k: int, top_p: float, left: set[int]) -> None:
    cut = truncate(torch.tensor([PROBABILITIES]).log(), torch.tensor([top_k]), torch.tensor([top_p]))
    assert set(cut[0].isfinite().nonzero()[:, 0].tolist()) == left


def test_equals_stay_together_and_a_sampled_token_stays_in_any_case() -> None:
    logits = torch.tensor([[1.0, 2.0, 1.0, 0.0]])
    k, p = torch.tensor([2]), torch.tensor([1.0])
    assert truncate(logits, k, p)[0].isfinite().tolist() == [True, True, True, False]
    assert truncate(logits, k, p, always=torch.tensor([3]))[0].isfinite().all()


def test_top_p_of_1_cuts_nothing_where_rounded_probabilities_sum_to_more() -> None:
    logits = 3 * torch.randn(1, 50_000, generator=torch.Generator().manual_seed(0))
    assert truncate(logits, torch.tensor([0]), torch.tensor([1.0])).isfinite().all()


def test_rows_are_independent_however_many_there_are() -> None:
    rows = ROWS_AT_ONCE + 3
    logits = torch.randn(rows, 7, generator=torch.Generator().manual_seed(1))
    k, p = torch.arange(rows) % 8, 0.2 + 0.8 * (torch.arange(rows) % 5) / 4
    together = truncate(logits, k, p)
    for row in (0, 1, ROWS_AT_ONCE - 1, ROWS_AT_ONCE, rows - 1):
        one = slice(row, row + 1)
        assert torch.equal(together[one], truncate(logits[one], k[one], p[one]))


def test_the_learners_gradient_is_that_of_the_cut_distribution() -> None:
    initialize(device=torch.device("cpu"))
    logits = torch.randn(6, 21, dtype=torch.float64, generator=torch.Generator().manual_seed(2), requires_grad=True)
    targets = logits.detach()[:, :19].argmax(-1)

    def found(given: torch.Tensor) -> torch.Tensor:
        return token_logprobs(given, targets, vocab_size=19, temperature=0.7, top_k=6, top_p=0.8)

    assert torch.autograd.gradcheck(found, (logits,))
    kept = truncate(logits.detach()[:, :19] / 0.7, torch.full((6,), 6), torch.full((6,), 0.8))
    want = kept.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    torch.testing.assert_close(found(logits), want)


@pytest.mark.parametrize("cut", [{"top_p": 0.9}, {"top_k": 20}])
def test_tensor_ranks_and_a_cut_vocabulary_do_not_go_together(cut: dict[str, float]) -> None:
    raw = {"model": {"size": {"hidden": 8, "layers": 1, "heads": 2}}, "environments": [{"type": "counting"}], "sampling": cut}
    Config.model_validate(raw)
    with pytest.raises(ValidationError, match=r"learner\.parallel\.tensor is 2"):
        Config.model_validate(raw | {"learner": {"parallel": {"processes": 2, "tensor": 2}}})
