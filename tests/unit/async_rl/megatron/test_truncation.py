"""Top-k and top-p: what is left, and what the learner refuses."""

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch.utils._python_dispatch import TorchDispatchMode

from async_rl.config import Config
from async_rl.megatron.truncation import BYTES_AT_ONCE, truncate

WORDS = 4096
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


def test_rows_are_independent_however_many_are_sorted_at_once() -> None:
    at_once = BYTES_AT_ONCE // (4 * WORDS)
    rows = at_once + 3
    logits = torch.randn(rows, WORDS, generator=torch.Generator().manual_seed(1))
    k, p = torch.arange(rows) % 8, 0.2 + 0.8 * (torch.arange(rows) % 5) / 4
    together = truncate(logits, k, p)
    for row in (0, 1, at_once - 1, at_once, rows - 1):
        one = slice(row, row + 1)
        assert torch.equal(together[one], truncate(logits[one], k[one], p[one]))


def test_the_cut_uses_only_what_a_gpu_computes_in_a_fixed_order() -> None:
    """torch refuses sums over parts of a row, of floats, where algorithms have to be deterministic."""

    class NoSumsOfFloats(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            assert func is not torch.ops.aten.cumsum.default or not args[0].is_floating_point()
            seen.append(func)
            return func(*args, **(kwargs or {}))

    seen: list[Any] = []
    with NoSumsOfFloats():
        truncate(torch.randn(2, 5), torch.tensor([0, 2]), torch.tensor([0.9, 0.9]))
    assert torch.ops.aten.cumsum.default in seen


@pytest.mark.parametrize("cut", [{"top_p": 0.9}, {"top_k": 20}])
def test_tensor_ranks_and_a_cut_vocabulary_do_not_go_together(cut: dict[str, float]) -> None:
    raw = {"model": {"size": {"hidden": 8, "layers": 1, "heads": 2}}, "environments": [{"type": "counting"}], "sampling": cut}
    Config.model_validate(raw)
    with pytest.raises(ValidationError, match=r"learner\.parallel\.tensor is 2"):
        Config.model_validate(raw | {"learner": {"parallel": {"processes": 2, "tensor": 2}}})
