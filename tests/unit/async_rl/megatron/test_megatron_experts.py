"""Layers of several experts: however ranks share them, the model and what it learns are those of a single process."""

import pytest
import torch
from safetensors.torch import load_file

from async_rl.errors import ConfigError
from async_rl.megatron import parallel
from async_rl.megatron.model import build_model, forward_packed, pack
from async_rl.megatron.parameters.full_parameters import local_parameters
from tests.support.full_parameters import gather_full
from tests.support.warm_processes import play_ranks
from tests.unit.async_rl.megatron.expert_rank import CPU, EXPERTS, SHAPE, sequences


@pytest.fixture(scope="module")
def divided(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    folder = tmp_path_factory.mktemp("experts")
    play_ranks("tests.unit.async_rl.megatron.expert_rank", folder)
    return load_file(folder / "gathered.safetensors")


@pytest.fixture
def single() -> torch.nn.Module:
    parallel.initialize(device=CPU)
    return build_model(SHAPE, device=CPU, dtype=torch.float32, seed=5)


@pytest.mark.parametrize("layout", ["expert", "tensor", "pipeline"])
@pytest.mark.parametrize("what", ["initial", "loaded"])
def test_two_ranks_hold_what_one_would(
    divided: dict[str, torch.Tensor], single: torch.nn.Module, layout: str, what: str
) -> None:
    whole = gather_full(single, SHAPE)
    assert whole is not None
    found = {name.removeprefix(f"{layout}.{what}."): each for name, each in divided.items() if f"{layout}.{what}" in name}
    assert found.keys() == whole.keys()
    for name, tensor in whole.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("layout", ["expert", "tensor"])
def test_tokens_find_their_experts_on_whatever_rank(
    divided: dict[str, torch.Tensor], single: torch.nn.Module, layout: str
) -> None:
    with torch.no_grad():
        logits = forward_packed(single, *pack(sequences())).logits()
    torch.testing.assert_close(divided[f"{layout}.logits"], logits, atol=1e-5, rtol=1e-5)


def test_an_expert_learns_from_the_tokens_of_every_rank(divided: dict[str, torch.Tensor], single: torch.nn.Module) -> None:
    forward_packed(single, *pack(sequences())).logits().logsumexp(dim=-1).sum().backward()
    local = local_parameters(single)
    for name in EXPERTS:
        gradient = local[name].grad
        assert gradient is not None
        assert gradient.abs().max() > 0, "every expert is somebody's choice, or this would prove little"
        torch.testing.assert_close(divided[f"expert.gradient.{name}"], gradient, atol=1e-5, rtol=1e-4)


def test_experts_that_cannot_be_divided_are_refused() -> None:
    parallel.shutdown()
    with pytest.raises(ConfigError, match=r"learner\.parallel\.expert"):
        parallel.initialize(device=CPU, expert=3)
    parallel.initialize(device=CPU)
