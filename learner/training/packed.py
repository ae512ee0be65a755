"""Pack examples into rows. Columns are aligned to the predicting position, as in learner/batches/packed_rows.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from async_rl.megatron.compat import PackedSeqParams
from async_rl.megatron.model import packed_params
from async_rl.tokenization.rendering import RenderedText
from learner.packing import plan
from learner.training.examples import Example


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TextRow:
    """[T] tokens in [S] texts; the texts of an example stand side by side."""

    token_ids: Tensor
    positions: Tensor
    targets: Tensor
    mask: Tensor
    """1 where the target is trained."""
    cu_seqlens: Tensor
    packing: PackedSeqParams
    reference: Tensor | None = None
    """Log-probabilities of the targets under the reference model."""

    @staticmethod
    def of(texts: Sequence[RenderedText], device: torch.device) -> TextRow:
        """Build a row; without texts it is one untrained token, because the layers refuse rows of length 0."""
        lengths = [len(text) for text in texts] if texts else [1]
        total = sum(lengths)
        token_ids, targets, mask = (np.zeros(total, np.int64) for _ in range(3))
        starts = np.cumsum([0, *lengths])
        for text, start in zip(texts, starts.tolist(), strict=False):
            stop = start + len(text)
            token_ids[start:stop] = text.token_ids
            targets[start : stop - 1] = text.token_ids[1:]
            mask[start : stop - 1] = text.trained[1:]
        cu_seqlens = torch.from_numpy(starts.astype(np.int32)).to(device)
        return TextRow(
            token_ids=torch.from_numpy(token_ids).to(device),
            positions=torch.from_numpy(np.concatenate([np.arange(length) for length in lengths])).to(device),
            targets=torch.from_numpy(targets).to(device),
            mask=torch.from_numpy(mask).to(device),
            cu_seqlens=cu_seqlens,
            packing=packed_params(cu_seqlens, max(lengths)),
        )

    def as_filler(self) -> TextRow:
        nothing = TextRow.of([], self.mask.device)
        return nothing if self.reference is None else replace(nothing, reference=self.reference.new_zeros(1))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleCounts:
    """Denominators of a step, over all its rows on all ranks."""

    tokens: int
    """Trained tokens."""
    examples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedExamples:
    """The packed texts of a step for all ranks; `rows` builds those of one."""

    shards: tuple[tuple[tuple[RenderedText, ...], ...], ...]
    """shard -> row -> texts"""
    counts: ExampleCounts
    capacity: int

    def rows(self, shard: int, device: torch.device) -> list[TextRow]:
        return [TextRow.of(texts, device) for texts in self.shards[shard]]

    @property
    def metrics(self) -> dict[str, float]:
        rows = [row for shard in self.shards for row in shard]
        tokens = [sum(map(len, row)) for row in rows]
        return {
            "batch/sequences": float(sum(map(len, rows))),
            "batch/trained_tokens": float(self.counts.tokens),
            "batch/tokens": float(sum(tokens)),
            "batch/bins": float(len(rows)),
            "batch/fill": sum(tokens) / (len(rows) * self.capacity),
        }


def pack(examples: Sequence[Example], *, capacity: int, num_shards: int) -> PackedExamples:
    """Pack examples without splitting them. Every shard has the same number of rows, at least one: updates are collective."""
    planned = plan([len(example) for example in examples], capacity, num_shards)
    return PackedExamples(
        shards=tuple(
            tuple(tuple(text for index in members for text in examples[index].texts) for members in bins or [[]])
            for bins in planned
        ),
        counts=ExampleCounts(
            tokens=sum(text.num_trained for example in examples for text in example.texts), examples=len(examples)
        ),
        capacity=capacity,
    )
