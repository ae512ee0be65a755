"""Keys and values of a batch of sequences of different lengths, in transformers' DynamicCache."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.cache_utils import DynamicCache


class BatchCache:
    """One row per sequence, padded on the left to the longest, so that all sequences end in the same column."""

    def __init__(self, device: torch.device) -> None:
        self._cache: Any = DynamicCache()
        self._lengths = torch.zeros(0, dtype=torch.long, device=device)
        self._width = 0

    @property
    def num_tokens(self) -> int:
        """Places in use, padding included."""
        return len(self._lengths) * self._width

    def extend(self, model: Any, tokens: Tensor) -> Tensor:
        """Add tokens [rows, any] to all sequences. Returns the logits of the last ones [rows, vocabulary]. The first call
        makes the rows.
        """
        rows, added = tokens.shape
        if not len(self._lengths):
            self._lengths = self._lengths.new_zeros(rows)
        columns = torch.arange(self._width + added, device=tokens.device)
        output = model(
            input_ids=tokens,
            position_ids=self._lengths[:, None] + torch.arange(added, device=tokens.device),
            attention_mask=columns >= (self._width - self._lengths)[:, None],
            use_cache=True,
            logits_to_keep=1,
            **{_cache_argument(type(model)): self._cache},
        )
        self._lengths = self._lengths + added
        self._width += added
        return output.logits[:, -1]

    def select(self, rows: Tensor) -> None:
        """Keep these rows, in this order; a row may be repeated. Frees the columns that only held padding."""
        self._lengths = self._lengths[rows]
        width = int(self._lengths.max()) if len(rows) else 0
        if not width:
            self._cache = DynamicCache()
        for layer in self._cache.layers:
            layer.keys, layer.values = (_kept(each, rows, width) for each in (layer.keys, layer.values))
        self._width = width

    def append(self, other: BatchCache) -> None:
        """Add the rows of another cache, which must not be used any more."""
        width = max(self._width, other._width)
        if not self._width:
            self._cache = other._cache
        else:
            for layer, added in zip(self._cache.layers, other._cache.layers, strict=True):
                layer.keys = torch.cat([_padded(layer.keys, width), _padded(added.keys, width)])
                layer.values = torch.cat([_padded(layer.values, width), _padded(added.values, width)])
        self._lengths = torch.cat([self._lengths, other._lengths])
        self._width = width


@cache
def _cache_argument(kind: type) -> str:
    """The argument of a model's `forward` that takes the cache: transformers 5.24 renamed it."""
    return "cache" if "cache" in inspect.signature(kind.forward).parameters else "past_key_values"


def _kept(states: Tensor, rows: Tensor, width: int) -> Tensor:
    return states[:, :, states.shape[2] - width :].index_select(0, rows)


def _padded(states: Tensor, width: int) -> Tensor:
    return functional.pad(states, (0, 0, width - states.shape[2], 0))
