"""Pack examples into rows, in which the texts of an example stand side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from async_rl.megatron.model import packed_params
from async_rl.tokenization.rendering import RenderedText
from learner.batches.device_rows import ModelRow, moved
from learner.batches.packed_rows import joined, predicted
from learner.packing.planner import plan
from learner.training.examples import Example

_NOTHING = RenderedText(token_ids=[0], trained=[False])


def text_row(texts: Sequence[RenderedText], device: torch.device) -> ModelRow:
    """Build a row; without texts it is one untrained token, because the layers refuse rows of length 0."""
    texts = texts if texts else [_NOTHING]
    lengths, token_ids = [len(text) for text in texts], [np.array(text.token_ids, np.int64) for text in texts]
    columns = {
        "token_ids": joined(token_ids, np.int64),
        "positions": joined([np.arange(length) for length in lengths], np.int64),
        "targets": predicted(token_ids, np.int64),
        "mask": predicted([np.array(text.trained, np.int64) for text in texts], np.int64),
        "cu_seqlens": np.cumsum([0, *lengths], dtype=np.int32),
    }
    tensors = moved(columns, device)
    return ModelRow(**tensors, packing=packed_params(tensors["cu_seqlens"], max(lengths)))


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

    def rows(self, shard: int, device: torch.device) -> list[ModelRow]:
        return [text_row(texts, device) for texts in self.shards[shard]]

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
