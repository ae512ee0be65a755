"""Rows that context ranks share: each computes two chunks of every sequence, in all layers.

    a sequence, padded    | 0 | 1 | 2 | 3 |       as many chunks as twice the ranks
    rank 0 of 2           | 0 |       | 3 |       an early chunk attends to little and a late one to much, so that
    rank 1                |   | 1 | 2 |   |       all ranks have as much to do

Which chunks are whose is what Megatron's rotary positions and Transformer Engine's attention expect.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from async_rl.megatron.compat import PackedSeqParams, gather_from_sequence_parallel_region


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowShards:
    """Of the places of a padded row."""

    group: dist.ProcessGroup
    lengths: Tensor
    """Of the padded sequences."""
    parts: Tensor
    """Which chunk of its sequence a place is in."""
    own: Tensor
    """This rank's places."""
    held_at: Tensor
    """Where each place is found when all ranks put theirs one after the other."""
    tokens: Tensor
    """The places of the row's own tokens; the others are padding."""

    def in_order(self, own: Tensor) -> Tensor:
        """What all ranks computed for their places, by place. Gradients come from all of them."""
        return gather_from_sequence_parallel_region(own, group=self.group)[self.held_at]

    def without_padding(self, own: Tensor) -> Tensor:
        """What all ranks computed, for the row's own tokens. All of them go on to compute the same from it."""
        everybodys = gather_from_sequence_parallel_region(own, tensor_parallel_output_grad=False, group=self.group)
        return everybodys[self.held_at[self.tokens]]


@dataclass
class ShardedPacking(PackedSeqParams):
    """How a padded row is divided into sequences, and these among ranks. It travels through Megatron's layers."""

    division: RowShards | None = None
    """Never None: Megatron's fields before it have defaults."""


def divide(
    token_ids: Tensor, packing: PackedSeqParams, group: dist.ProcessGroup, *, multiple: int
) -> tuple[Tensor, Tensor, ShardedPacking, RowShards]:
    """This rank's token ids and positions, as many as a multiple of `multiple`."""
    ranks, chunks = group.size(), 2 * group.size()
    starts, lengths = packing.cu_seqlens_q[:-1].long(), packing.cu_seqlens_q.diff().long()
    padded = (lengths + chunks - 1) // chunks * chunks
    even = multiple if multiple % 2 == 0 else 2 * multiple  # a rank has two chunks of each sequence
    if missing := -int(padded.sum()) // ranks % even:
        padded = torch.cat([padded, padded.new_tensor([missing * ranks])])
    ends = torch.cat([padded.new_zeros(1), padded.cumsum(0)])
    total = int(ends[-1])

    positions = torch.arange(total, device=padded.device) - ends[:-1].repeat_interleave(padded)
    parts = positions // (padded // chunks).repeat_interleave(padded)
    order = torch.minimum(parts, chunks - 1 - parts).argsort(stable=True)  # holder after holder
    own = order.view(ranks, -1)[group.rank()]
    tokens = torch.arange(len(token_ids), device=padded.device) + (ends[: len(starts)] - starts).repeat_interleave(lengths)
    division = RowShards(group=group, lengths=padded, parts=parts, own=own, held_at=order.argsort(), tokens=tokens)

    longest, sequences = int(padded.max()), ends.to(torch.int32)
    filled = token_ids.new_zeros(total).index_copy(0, tokens, token_ids)
    divided = ShardedPacking(
        qkv_format="thd",
        cu_seqlens_q=sequences,
        cu_seqlens_kv=sequences,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        division=division,
    )
    return filled[own], positions[own], divided, division
