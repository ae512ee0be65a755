"""Two tensor ranks, each with half of the vocabulary, find the values and gradients of the whole."""

from collections.abc import Callable

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.support.warm_processes import play_ranks
from tests.unit.async_rl.megatron.heads.naive import Given, divergences, logs, scores
from tests.unit.async_rl.megatron.heads.shards_rank import SPLITS, TEMPERATURE, VOCABULARIES, given, teacher


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Tensor]]:
    folder = tmp_path_factory.mktemp("shards")
    play_ranks("tests.unit.async_rl.megatron.heads.shards_rank", folder)
    return [load_file(folder / f"{rank}.safetensors") for rank in range(2)]


def naive(name: str, mine: Given) -> Callable[[Tensor, Tensor], Tensor]:
    if name == "divergence":
        beside = teacher(mine.vocab_size)
        of_teacher = logs(beside.hidden, beside.weight, mine.vocab_size, TEMPERATURE)
        return lambda hidden, weight: divergences(logs(hidden, weight, mine.vocab_size, TEMPERATURE), of_teacher, "mixed")
    part = ("logprobs", "entropies").index(name)
    how = {"vocab_size": mine.vocab_size, "temperature": TEMPERATURE}
    return lambda hidden, weight: scores(hidden, weight, mine.targets, **how)[part]


@pytest.mark.parametrize("name", ["logprobs", "entropies", "divergence"])
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_shards_agree_with_the_whole(found: list[dict[str, Tensor]], vocabulary: str, split: str, name: str) -> None:
    mine, label = given(VOCABULARIES[vocabulary]), f"{vocabulary}.{split}.{name}"
    hidden, weight = (each.clone().requires_grad_() for each in (mine.hidden, mine.weight))
    value = naive(name, mine)(hidden, weight)
    of_hidden, of_weight = torch.autograd.grad((value * torch.linspace(-1, 1, 10, dtype=torch.float64)).sum(), (hidden, weight))
    for rank in (0, 1):
        torch.testing.assert_close(found[rank][f"{label}.value"], value.detach())
        wanted = of_hidden.chunk(2)[rank] if SPLITS[split] else of_hidden
        torch.testing.assert_close(found[rank][f"{label}.hidden"], wanted)
        torch.testing.assert_close(found[rank][f"{label}.weight"], of_weight.chunk(2)[rank])
