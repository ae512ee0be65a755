"""Context ranks share a row: every token once, as many for each, and chunks from both ends of every sequence."""

from __future__ import annotations

from typing import cast

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from async_rl.megatron.attention.context_parallel import RowShards, ShardedPacking, divide
from async_rl.megatron.model import pack


class Place:
    """What is asked of a process group."""

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank, self._ranks = rank, ranks

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._ranks


def divided(
    lengths: list[int], ranks: int, multiple: int = 1
) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor, ShardedPacking, RowShards]]]:
    ids = torch.arange(1, sum(lengths) + 1)
    _, _, packing = pack(list(ids.split(lengths)))
    groups = [cast("dist.ProcessGroup", Place(rank, ranks)) for rank in range(ranks)]
    return ids, [divide(ids, packing, group, multiple=multiple) for group in groups]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(2, 5), st.sampled_from([1, 2, 3, 16]))
def test_every_token_is_computed_once_and_found_again(lengths: list[int], ranks: int, multiple: int) -> None:
    ids, parts = divided(lengths, ranks, multiple)
    assert len({len(own) for own, *_ in parts}) == 1
    assert len(parts[0][0]) % multiple == 0
    division = parts[0][3]
    together = torch.cat([own for own, *_ in parts])
    assert together[division.held_at[division.tokens]].tolist() == ids.tolist()
    positions = torch.cat([own for _, own, *_ in parts])
    expected = torch.cat([torch.arange(length) for length in lengths])
    assert positions[division.held_at[division.tokens]].tolist() == expected.tolist()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_has_the_chunks_that_megatron_rotates(rank: int) -> None:
    _, parts = divided([8, 3], 2)
    _, positions, packing, _ = parts[rank]
    assert packing.cu_seqlens_q.tolist() == [0, 8, 12]
    assert positions.tolist() == [[0, 1, 6, 7, 0, 3], [2, 3, 4, 5, 1, 2]][rank]
