"""Attention over pages equals torch's: gathered on a CPU, and the Triton kernel, which runs interpreted here."""

import pytest

from async_rl.megatron.attention.gathered_pages import gathered_attention
from tests.support.interpreted import interpreted_once
from tests.unit.async_rl.megatron.paged_cases import CASES, TOLERANCES, largest_difference


@pytest.fixture(scope="module")
def of_triton(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    return interpreted_once(tmp_path_factory, "tests.unit.async_rl.megatron.paged_cases")


@pytest.mark.parametrize("name", CASES)
def test_the_triton_kernel_attends_as_torch_does(of_triton: dict[str, float], name: str) -> None:
    assert of_triton[name] < TOLERANCES[CASES[name].dtype]


@pytest.mark.parametrize("name", CASES)
def test_gathered_pages_attend_as_torch_does(name: str) -> None:
    assert largest_difference(gathered_attention, CASES[name]) < TOLERANCES[CASES[name].dtype]
