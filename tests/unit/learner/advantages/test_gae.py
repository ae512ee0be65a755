"""Advantages of single tokens, against a loop over the tokens of one sequence after the other."""

import math
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from learner.advantages.config import GaeAdvantages, ReturnAdvantages
from learner.advantages.gae import gae, whiten
from learner.ranks.token_advantages import token_advantages
from tests.support.warm_processes import play_ranks


def packed(seed: int, lengths: list[int]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    return {
        "token_rewards": torch.randn(total, generator=generator, dtype=torch.float64),
        "values": torch.randn(total, generator=generator, dtype=torch.float64),
        "mask": (torch.rand(total, generator=generator) < 0.6).to(torch.uint8),
        "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0).int(),
    }


def in_a_loop(row: dict[str, Tensor], gamma: float, lam: list[float]) -> tuple[list[float], list[float]]:
    """Backwards, where a masked token leaves everything as it is."""
    rewards, values, mask = (row[name].tolist() for name in ("token_rewards", "values", "mask"))
    advantages, returns = [0.0] * len(mask), [0.0] * len(mask)
    for (start, stop), lam_here in zip(pairwise(row["cu_seqlens"].tolist()), lam, strict=True):
        value = advantage = 0.0
        for t in reversed(range(start, stop)):
            if mask[t]:
                advantage = rewards[t] + gamma * value - values[t] + gamma * lam_here * advantage
                value = values[t]
                advantages[t], returns[t] = advantage, advantage + value
    return advantages, returns


def test_by_hand() -> None:
    row = {
        "token_rewards": torch.tensor([9.0, 0.0, 9.0, 1.0, 2.0]),
        "values": torch.tensor([9.0, 0.5, 9.0, 0.25, 1.0]),
        "mask": torch.tensor([0, 1, 0, 1, 1]),
        "cu_seqlens": torch.tensor([0, 4, 5]),
    }
    advantages, returns = gae(**row, gamma=0.5, lam=0.5)
    # the last of the first sequence: 1 - 0.25; before it: 0 + 0.5 * 0.25 - 0.5 + 0.25 * 0.75
    assert advantages.tolist() == [0, -0.1875, 0, 0.75, 1.0]
    assert returns.tolist() == [0, 0.3125, 0, 1.0, 2.0]


@given(
    seed=st.integers(0, 10_000),
    lengths=st.lists(st.integers(0, 9), max_size=6),
    gamma=st.sampled_from([0.0, 0.9, 1.0]),
    lam=st.sampled_from([0.0, 0.95, 1.0]),
)
def test_all_tokens_at_once_is_one_after_the_other(seed: int, lengths: list[int], gamma: float, lam: float) -> None:
    row = packed(seed, lengths)
    found = gae(**row, gamma=gamma, lam=lam)
    for each, wanted in zip(found, in_a_loop(row, gamma, [lam] * len(lengths)), strict=True):
        torch.testing.assert_close(each, torch.tensor(wanted, dtype=torch.float64), atol=1e-12, rtol=1e-12)


def test_a_long_sequence_in_float32_keeps_its_sum() -> None:
    """With lambda 1 the first advantage is all rewards less the first value: ten thousand additions must not drift."""
    count = 10_000
    rewards = torch.full((count,), 0.1)
    ones = torch.ones(count)
    advantages, _ = gae(rewards, ones, ones, torch.tensor([0, count]))
    assert advantages[0].item() == pytest.approx(count * 0.1 - 1, rel=1e-6)


def test_without_a_critic_an_advantage_is_what_is_still_to_come() -> None:
    row = packed(5, [4, 0, 7])
    del row["values"]
    advantages, returns = token_advantages(ReturnAdvantages(gamma=0.9), **row)
    wanted, _ = in_a_loop(row | {"values": torch.zeros(11)}, 0.9, [1.0] * 3)
    torch.testing.assert_close(advantages, torch.tensor(wanted, dtype=torch.float64))
    assert torch.equal(advantages, returns)


def test_a_longer_sequence_looks_further_ahead_and_the_critic_does_not() -> None:
    row = packed(6, [9, 1, 5, 3])
    trained = [int(each.sum()) for each in row["mask"].split([9, 1, 5, 3])]
    lam = [max(1 - 1 / (0.5 * max(count, 1)), 0) for count in trained]
    assert len(set(lam)) > 1
    found = token_advantages(GaeAdvantages(lam=1.0, length_adaptive=0.5), **row)
    for each, wanted in zip(found, (in_a_loop(row, 1.0, lam)[0], in_a_loop(row, 1.0, [1.0] * 4)[1]), strict=True):
        torch.testing.assert_close(each, torch.tensor(wanted, dtype=torch.float64))


def test_values_must_be_given_to_gae() -> None:
    row = packed(7, [3])
    del row["values"]
    with pytest.raises(ValueError, match="values"):
        token_advantages(GaeAdvantages(), **row)


# -- whitening -----------------------------------------------------------------------------------------------------------


def test_whitening_sees_trained_tokens_only() -> None:
    found = whiten(torch.tensor([1.0, 100.0, 2.0, 6.0]), torch.tensor([1, 0, 1, 1]))
    torch.testing.assert_close(found, torch.tensor([-2.0, 0.0, -1.0, 3.0]) / math.sqrt(7 + 1e-8))


@pytest.mark.parametrize("mask", [[0, 0, 0], [0, 1, 0], [1, 1, 1]])
def test_nothing_is_made_of_rounding(mask: list[int]) -> None:
    assert whiten(torch.full((3,), 0.1), torch.tensor(mask)).tolist() == [0, 0, 0]


def whiten_parts(folder: Path, rank: int) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 2), rank=rank, world_size=2)
    for first in (2, 6):
        part = torch.arange(6.0).square().split([first, 6 - first])[rank]
        found = whiten(part, torch.ones(len(part)), group=dist.group.WORLD)
        torch.save(found, folder / f"{first}.{rank}.pt")
    dist.destroy_process_group()  # its threads must not outlive the interpreter


def test_ranks_whiten_as_if_they_were_one(tmp_path: Path) -> None:
    """Also where one of them has nothing to train on, and must still take part."""
    play_ranks("tests.unit.learner.advantages.test_gae", tmp_path)
    for first in (2, 6):
        together = torch.cat([torch.load(tmp_path / f"{first}.{rank}.pt", weights_only=True) for rank in range(2)])
        torch.testing.assert_close(together, whiten(torch.arange(6.0).square(), torch.ones(6)))


if __name__ == "__main__":
    whiten_parts(Path(sys.argv[1]), int(sys.argv[2]))
