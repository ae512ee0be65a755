"""`learner.kernels: torch` turns off every Triton kernel of a learner, in one place."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from async_rl.megatron import parallel, triton_kernels
from async_rl.megatron.attention.self_attention import SelfAttentionOfLayer
from async_rl.megatron.heads.choices import Choices, FusedChoices, choices_on
from async_rl.megatron.layers.norms import Norm
from async_rl.megatron.layers.swiglu import FusedSwiglu, fuses_swiglu
from learner.ranks.distributed import init_distributed
from tests.support.learner_rank import config, shape

GPU = torch.device("cuda")
ON_GPU: Any = SimpleNamespace(device=GPU, dtype=torch.bfloat16)


@pytest.fixture(autouse=True)
def chosen_again() -> Iterator[None]:
    yield
    triton_kernels.choose("auto")
    parallel.shutdown()


def learner(kernels: str) -> Any:
    tree = config().model_dump()
    tree["learner"]["kernels"] = kernels
    return type(config()).model_validate(tree | {"device": "cpu"})


def test_it_is_for_every_kernel_of_a_rank() -> None:
    for kernels, has_kernels in (("auto", True), ("torch", False), ("auto", True)):
        init_distributed(learner(kernels))
        assert SelfAttentionOfLayer.uses_kernels(GPU) is has_kernels
        assert Norm.uses_kernels(ON_GPU) is has_kernels
        assert fuses_swiglu(shape(config()), GPU) is has_kernels
        assert choices_on(ON_GPU) is (FusedChoices if has_kernels else Choices)


def test_modules_that_are_built_with_a_kernel_ask_too() -> None:
    triton_kernels.choose("torch")
    given = torch.randn(3, 8)
    pretends: Any = SimpleNamespace(device=GPU, chunk=given.chunk)
    torch.testing.assert_close(FusedSwiglu().forward(pretends), FusedSwiglu().forward(given))
