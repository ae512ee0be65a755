"""The kernels that read logits, in Triton's interpreter; and where they are used."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from async_rl.megatron.heads.choices import Choices, FusedChoices, choices_on
from tests.support.interpreted import interpreted


def test_the_kernels_compute_what_whole_logits_in_float64_give() -> None:
    found = interpreted("tests.unit.async_rl.megatron.heads.logit_cases")
    assert len(found) == 12 + 12 + 8
    for name, difference in found.items():
        assert difference < (2**-7 if "bfloat16" in name else 1e-5), name


@pytest.mark.parametrize(("dtype", "on_gpu"), [(torch.bfloat16, FusedChoices), (torch.float64, Choices)])
def test_a_gpu_has_them_for_logits_in_float32(dtype: torch.dtype, on_gpu: type[Choices]) -> None:
    on_a_gpu: Any = SimpleNamespace(device=torch.device("cuda"), dtype=dtype)
    assert choices_on(on_a_gpu) is on_gpu
    assert choices_on(torch.zeros(1, dtype=dtype)) is Choices
