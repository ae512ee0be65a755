"""The Triton sampler, interpreted, draws what torch's would: the same tokens are kept, with the same probabilities."""

import random
from typing import Any

import pytest
import torch

from rollout_workers.inference.sampling_kernels import TritonDraws
from tests.support.compiled_kernels import compiling_for
from tests.support.interpreted import interpreted_once
from tests.unit.rollout_workers.inference.sampling_cases import (
    CPU,
    DRAWS,
    DTYPES,
    FEW,
    LISTS,
    REPEATS,
    TEMPERATURE,
    generation,
    torch_logprobs,
)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return interpreted_once(tmp_path_factory, "tests.unit.rollout_workers.inference.sampling_cases")


@pytest.mark.parametrize("case", [*map(str, DTYPES), *LISTS])
def test_tokens_are_kept_and_scored_as_by_torch(report: dict[str, Any], case: str) -> None:
    found = report["found"][case]
    assert all(found["kept"])
    assert found["difference"] < 3e-6
    assert found["greedy"] == [0.0, 0]
    assert found["lists"]


def test_tokens_are_drawn_as_often_as_they_are_likely(report: dict[str, Any]) -> None:
    expected = DRAWS * REPEATS * torch_logprobs(FEW[None], [generation(temperature=TEMPERATURE)])[0].exp()
    chi_squared = ((torch.tensor(report["counted"]) - expected) ** 2 / expected).sum()
    degrees = len(FEW) - 1
    assert chi_squared < degrees + 5 * (2 * degrees) ** 0.5


def test_a_seed_gives_the_same_tokens_in_any_batch_and_from_any_step(report: dict[str, Any]) -> None:
    seeded = report["seeded"]
    assert seeded["alone"] == seeded["among"]
    assert seeded["alone"] != seeded["other"]
    assert seeded["later"][:2] == seeded["alone"][1:]


def test_the_smallest_share_leaves_the_likeliest_token(report: dict[str, Any]) -> None:
    drawn, likeliest, logprobs = report["least"]
    assert drawn == likeliest
    assert logprobs == [0.0] * 3


@pytest.mark.parametrize("gpu", ["A100", "H100"])
def test_it_compiles_without_spilling(gpu: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with compiling_for(gpu) as kernels:
        for arguments in ({}, {"top_p": 0.9}):
            draws = TritonDraws([generation(**arguments)] * 3, CPU, random.Random(1))
            draws.drawn(torch.zeros(3, 151_936, dtype=torch.bfloat16))
    for each in kernels:
        print(gpu, each)
    assert [each.name for each in kernels] == ["_draw", "_merge", "_find_cut", "_draw", "_merge"]
    assert not any(each.spilled_bytes for each in kernels)
