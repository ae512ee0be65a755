"""Divergences of two models' distributions from hidden states, against those of whole logits in float64."""

import pytest
import torch
from torch import Tensor

from async_rl.megatron import parallel
from async_rl.megatron.heads.divergence import REVERSE_SHARE, Direction, divergence
from tests.support.packed_outputs import packed_output
from tests.unit.async_rl.megatron.heads.naive import Given, divergences, logs


@pytest.fixture(autouse=True)
def alone() -> None:
    parallel.initialize(device=torch.device("cpu"))


@pytest.mark.parametrize("direction", REVERSE_SHARE)
@pytest.mark.parametrize("rows", [1, 3, 500])
@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_values_and_gradients_are_those_of_whole_logits(tokens: int, rows: int, direction: Direction) -> None:
    given, teacher = Given.random(tokens), Given.random(tokens, width=4, seed=2)
    sizes = {"vocab_size": 19, "bytes_at_once": rows * 3 * 19 * 8}

    def ours(hidden: Tensor, weight: Tensor) -> Tensor:
        student, of_teacher = packed_output(hidden, weight, **sizes), packed_output(teacher.hidden, teacher.weight, **sizes)
        return divergence(student, of_teacher, direction=direction, temperature=1.5)

    def naive(hidden: Tensor, weight: Tensor) -> Tensor:
        return divergences(logs(hidden, weight, 19, 1.5), logs(teacher.hidden, teacher.weight, 19, 1.5), direction)

    for found, wanted in zip(given.gradients(ours), given.gradients(naive), strict=True):
        torch.testing.assert_close(found, wanted)


def test_equal_models_are_not_apart() -> None:
    given = Given.random(7)
    output = packed_output(given.hidden.float(), given.weight.float(), vocab_size=19)
    for direction in REVERSE_SHARE:
        assert divergence(output, output, direction=direction).abs().max() < 1e-6
