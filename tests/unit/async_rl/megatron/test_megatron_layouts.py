"""However the ranks divide a model, it is the same model: initial weights, gathered snapshots, log-probabilities."""

import pytest
import torch
from safetensors.torch import load_file

from async_rl.megatron import parallel
from async_rl.megatron.model import build_model
from tests.support.full_parameters import gather_full
from tests.support.warm_processes import play_ranks
from tests.unit.async_rl.megatron.layout_rank import CPU, scored, shape


@pytest.fixture(scope="module")
def gathered(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    folder = tmp_path_factory.mktemp("layouts")
    play_ranks("tests.unit.async_rl.megatron.layout_rank", folder)
    return load_file(folder / "gathered.safetensors")


@pytest.fixture(autouse=True)
def alone() -> None:
    parallel.initialize(device=CPU)


def gathered_under(gathered: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in gathered.items() if name.startswith(prefix)}


@pytest.mark.parametrize("layout", ["tensor", "pipeline"])
@pytest.mark.parametrize("tied", [True, False])
def test_two_ranks_hold_what_one_would(gathered: dict[str, torch.Tensor], layout: str, tied: bool) -> None:
    single = gather_full(build_model(shape(tied=tied), device=CPU, dtype=torch.float32, seed=5), shape(tied=tied))
    assert single is not None
    for what in ("initial", "loaded"):
        found = gathered_under(gathered, f"{layout}.{'tied' if tied else 'untied'}.{what}.")
        assert found.keys() == single.keys()
        for name, tensor in single.items():
            assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("tied", [True, False])
def test_logprobs_and_gradients_do_not_depend_on_tensor_ranks(gathered: dict[str, torch.Tensor], tied: bool) -> None:
    model = build_model(shape(tied=tied), device=CPU, dtype=torch.float32, seed=5)
    logprobs, gradient = scored(model)
    label = f"tensor.{'tied' if tied else 'untied'}"
    torch.testing.assert_close(gathered[f"{label}.logprobs"], logprobs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gathered[f"{label}.gradient"], gradient, atol=1e-5, rtol=1e-4)
