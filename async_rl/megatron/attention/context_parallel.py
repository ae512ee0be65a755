"""Context parallelism: each context rank computes two chunks of every sequence of a packed row.

    a sequence, padded    | 0 | 1 | 2 | 3 |       as many chunks as twice the ranks
    rank 0 of 2           | 0 |       | 3 |       an early chunk attends to few tokens and a late one to many,
    rank 1                |   | 1 | 2 |   |       so all ranks have the same work

Transformer Engine's attention expects this assignment.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from async_rl.megatron.attention.row_packing import RowPacking
from async_rl.megatron.compat import PackedSeqParams, gather_from_sequence_parallel_region


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowShards:
    """How the tokens of a padded row are assigned to context ranks. Positions index the padded row."""

    group: dist.ProcessGroup
    lengths: Tensor
    """Lengths of the padded sequences."""
    parts: Tensor
    """Chunk number of each position."""
    own: Tensor
    """Positions of this rank."""
    held_at: Tensor
    """Index of each position in the concatenation of all ranks' positions."""
    tokens: Tensor
    """Positions of tokens; all others are padding."""

    def shard(self, values: Tensor, *, filler: float) -> Tensor:
        """Take this rank's part of one value per token; padding gets `filler`."""
        padded = values.new_full((len(self.parts),), filler)
        return padded.index_copy(0, self.tokens, values)[self.own]

    def in_order(self, own: Tensor) -> Tensor:
        """Gather all ranks' values in the order of positions. Gradients are summed over ranks."""
        return gather_from_sequence_parallel_region(own, group=self.group)[self.held_at]

    def without_padding(self, own: Tensor) -> Tensor:
        """Gather all ranks' values for tokens only. All ranks must compute the same from them."""
        gathered = gather_from_sequence_parallel_region(own, tensor_parallel_output_grad=False, group=self.group)
        return gathered[self.held_at[self.tokens]]


@dataclass
class ShardedPacking(RowPacking):
    """Sequence boundaries of a padded row with its shards; `positions` are those of this rank's tokens."""

    division: RowShards | None = None
    """Never None; it has a default because Megatron's fields before it have."""


def divide(
    token_ids: Tensor, packing: PackedSeqParams, group: dist.ProcessGroup, *, multiple: int
) -> tuple[Tensor, Tensor, ShardedPacking, RowShards]:
    """Divide a row: returns this rank's token ids and positions, padded to a multiple of `multiple`, and their layout."""
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
    divided = ShardedPacking(
        qkv_format="thd",
        cu_seqlens_q=sequences,
        cu_seqlens_kv=sequences,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        positions=positions[own],
        division=division,
    )
    return division.shard(token_ids, filler=0), positions[own], divided, division
