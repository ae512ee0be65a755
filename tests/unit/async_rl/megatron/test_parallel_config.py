"""Divisions and savings that cannot be are refused in one sentence, before anything is built."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError

from async_rl.config.learner import LearnerConfig, ParallelConfig
from async_rl.errors import ConfigError
from async_rl.megatron import parallel
from async_rl.megatron.parallel import ModelParallelSizes
from learner.model import compute_options

CPU = torch.device("cpu")


def division(**sizes: int) -> ModelParallelSizes:
    return ModelParallelSizes(**{"tensor": 1, "pipeline": 1, "virtual_stages": 1, "context": 1, "expert": 1, **sizes})


@pytest.mark.parametrize(
    ("parallel", "complaint"),
    [
        ({"virtual_stages": 2}, "virtual_stages interleaves the stages of a pipeline"),
        ({"sequence": True}, "needs tensor above 1"),
        ({"tensor": 2, "context": 2, "processes": 6}, r"multiple of tensor x pipeline x context \(4\)"),
        ({"pipeline": 2, "expert": 4, "processes": 4}, r"expert \(4\) must divide processes / pipeline \(2\)"),
    ],
)
def test_a_section_that_contradicts_itself_is_refused(parallel: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValidationError, match=complaint):
        ParallelConfig.model_validate(parallel)


@pytest.mark.parametrize(
    ("parallel", "ranks"),
    [
        ({}, 1),
        ({"processes": 3}, 3),
        ({"tensor": 2, "pipeline": 2}, 4),
        ({"expert": 4}, 4),
        ({"tensor": 2, "expert": 4}, 4),
        ({"pipeline": 2, "expert": 3}, 6),
        ({"context": 2, "pipeline": 2, "expert": 4}, 8),
        ({"tensor": 2, "processes": 8}, 8),
    ],
)
def test_a_division_says_how_many_ranks_it_needs(parallel: dict[str, int], ranks: int) -> None:
    asked = ParallelConfig.model_validate(parallel)
    assert asked.ranks == ranks
    sizes = {name: size for name, size in parallel.items() if name != "processes"}
    division(**sizes).check(asked.ranks)


def test_ranks_that_cannot_be_divided_are_refused() -> None:
    division(tensor=2, context=2, expert=4).check(8)
    with pytest.raises(ConfigError, match="6 ranks cannot be divided into tensor 2 x pipeline 2"):
        division(tensor=2, pipeline=2).check(6)
    with pytest.raises(ConfigError, match=r"expert \(4\) must divide the ranks of one stage \(2\)"):
        division(pipeline=2, expert=4).check(4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"precision": "fp8"}, "learner.precision: fp8 needs a GPU"),
        ({"optimizer": {"offload": True}}, "set it to false without a GPU"),
    ],
)
def test_what_needs_a_gpu_is_refused_without_one(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        compute_options(LearnerConfig.model_validate(settings), CPU, "local")


def test_precision_decides_what_layers_compute_in() -> None:
    assert parallel.resolve_dtype(CPU, "bfloat16") is parallel.resolve_dtype(CPU, "fp8") is torch.bfloat16
    assert parallel.resolve_dtype(torch.device("cuda"), "float32") is torch.float32
