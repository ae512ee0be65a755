"""Attention over the pages of a KV cache in plain torch, for CPUs: pages are gathered.

All requests that decode one token share one padded gather and one attention call.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

MAX_PADDED_SCORES = 1 << 22
"""Prompts are batched with padding up to this many attention scores; longer ones are computed one by one."""


def gathered_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    starts: Tensor,
    *,
    longest: int,
    scale: float | None = None,
    window: int | None = None,
    is_decode_only: bool,
) -> Tensor:
    """As paged_kernels.paged_attention, except that decoding requests without keys get some finite numbers."""
    pages = _Pages(block_table, size=k.shape[1], heads=k.shape[2])
    return _plan_of_step(pages, lengths, starts, longest, is_decode_only, window).attend(q, k, v, scale)


def keep_cudnn_out(device: torch.device) -> None:
    """Have torch's SDPA choose among its other kernels, in the whole process: those of cuDNN plan anew, for milliseconds, when
    the longest request has grown, which is in every step of an engine.
    """
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)


@dataclass(frozen=True, slots=True)
class _Pages:
    """The cache's pages of a step's requests."""

    table: Tensor
    size: int
    heads: int

    def rows(self, position: Tensor, requests: Tensor | slice = slice(None)) -> Tensor:
        """Rows of the flattened cache, [requests, heads, positions]; a row is what one head has of one position.

        Head by head, so that a head's keys lie together: attention over keys that lie apart takes twice as long.
        """
        table = self.table[requests, : -(-len(position) // self.size)].clamp(min=0).long()
        tokens = table[:, position // self.size] * self.size + position % self.size
        return tokens[:, None] * self.heads + torch.arange(self.heads, device=tokens.device)[:, None]


@dataclass(frozen=True, slots=True)
class _Part:
    """Requests that are computed together."""

    queries: Tensor
    """Rows of q, [requests, queries each]; shorter requests are padded with their first row."""
    keys: Tensor
    """Rows of the flattened cache, [requests, heads, longest]."""
    mask: Tensor
    """[requests, 1, queries each (or 1), longest]"""
    is_real: Tensor | None
    """Which of `queries` are not padding; None: all."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, scale: float | None) -> None:
        groups, dim = k.shape[-2:]
        requests, width = self.queries.shape
        # Query heads that share a key head become further queries, so that keys are not repeated.
        shared = q.shape[1] // groups
        own = q[self.queries].view(requests, width, groups, shared, dim).permute(0, 2, 1, 3, 4).flatten(2, 3)
        keys, values = (_gathered(pool, self.keys) for pool in (k, v))
        mask = self.mask if width == 1 else self.mask.repeat_interleave(shared, dim=2)
        attended = functional.scaled_dot_product_attention(own, keys, values, attn_mask=mask, scale=scale)
        attended = attended.view(requests, groups, width, shared, dim).permute(0, 2, 1, 3, 4).flatten(2, 3)
        if self.is_real is None:
            out[self.queries] = attended
        else:
            out[self.queries[self.is_real]] = attended[self.is_real]


@dataclass(frozen=True, slots=True)
class _Decoding:
    """A step in which all requests have one query, so that no gather of queries is needed."""

    keys: Tensor
    """Rows of the flattened cache, [requests, heads, longest]."""
    mask: Tensor
    """[requests, 1, 1, longest]"""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        requests, heads, dim = q.shape
        groups = k.shape[-2]
        keys, values = (_gathered(pool, self.keys) for pool in (k, v))
        own = q.view(requests, groups, heads // groups, dim)
        attended = functional.scaled_dot_product_attention(own, keys, values, attn_mask=self.mask, scale=scale)
        return attended.view(requests, heads, dim)


@dataclass(frozen=True, slots=True)
class _Plan:
    """The batches of one engine step, computed once for all layers with the same window."""

    parts: tuple[_Part, ...]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        out = torch.zeros_like(q)
        for part in self.parts:
            part.attend(q, k, v, out, scale)
        return out


def _gathered(pool: Tensor, rows: Tensor) -> Tensor:
    """[requests, heads, longest, dim]"""
    dim = pool.shape[-1]
    return pool.view(-1, dim).index_select(0, rows.view(-1)).view(*rows.shape, dim)


def _plan_of_step(
    pages: _Pages, lengths: Tensor, starts: Tensor, longest: int, is_decode_only: bool, window: int | None
) -> _Plan | _Decoding:
    """Make the plan, or get it from the step's block table, a tensor object that only the layers of one step share."""
    plans: dict[int | None, _Plan | _Decoding] | None = getattr(pages.table, "async_rl_plans", None)
    if plans is None:
        plans = pages.table.async_rl_plans = {}  # pyright: ignore[reportAttributeAccessIssue]
    if window not in plans:
        if is_decode_only:
            plans[window] = _decoding(pages, lengths, longest, window)
        else:
            plans[window] = _make_plan(pages, lengths, starts, window)
    return plans[window]


def _decoding(pages: _Pages, lengths: Tensor, longest: int, window: int | None) -> _Decoding:
    position = torch.arange(longest, device=lengths.device)
    last = (lengths - 1).clamp_(min=0)[:, None]  # a row of padding has no keys, and reads one of another request
    return _Decoding(keys=pages.rows(position), mask=_seen(position, last, window)[:, None, None])


def _seen(position: Tensor, last: Tensor, window: int | None) -> Tensor:
    """Whether a query whose own position is `last` attends to a position."""
    return position <= last if window is None else (position <= last) & (position > last - window)


def _make_plan(pages: _Pages, lengths: Tensor, starts: Tensor, window: int | None) -> _Plan:
    bounds = starts.tolist()
    counts = [stop - start for start, stop in pairwise(bounds)]
    work = [
        (request, start, count, length)
        for request, (start, count, length) in enumerate(zip(bounds, counts, lengths.tolist(), strict=False))
        if count > 0 and length > 0
    ]
    decoding = [item for item in work if item[2] == 1]
    prompts = [item for item in work if item[2] > 1]
    batches = [decoding, *_batches_of_prompts(prompts)]
    return _Plan(tuple(_make_part(batch, pages, window) for batch in batches if batch))


_Work = tuple[int, int, int, int]
"""request, first row of q, number of queries, number of keys"""


def _batches_of_prompts(prompts: list[_Work]) -> list[list[_Work]]:
    """Batch prompts of similar lengths, to limit padding."""
    batches: list[list[_Work]] = []
    for item in sorted(prompts, key=lambda item: item[3]):
        _, _, queries, keys = item
        if batches and (len(batches[-1]) + 1) * queries * keys <= MAX_PADDED_SCORES and keys <= 2 * batches[-1][0][3]:
            batches[-1].append(item)
        else:
            batches.append([item])
    return batches


def _make_part(work: list[_Work], pages: _Pages, window: int | None) -> _Part:
    device = pages.table.device
    requests, first, queries, keys = torch.tensor(work, device=device).unbind(1)
    width, longest = int(max(item[2] for item in work)), int(max(item[3] for item in work))
    offset = torch.arange(width, device=device)
    is_real = offset < queries[:, None]
    rows = first[:, None] + torch.where(is_real, offset, 0)

    position = torch.arange(longest, device=device)
    # Query j of n, standing at position keys - n + j, sees the keys up to itself.
    last_seen = (keys - queries)[:, None] + torch.where(is_real, offset, 0)
    mask = _seen(position, last_seen[:, :, None], window)
    return _Part(
        queries=rows,
        keys=pages.rows(position, requests),
        mask=mask[:, None],
        is_real=None if bool(is_real.all()) else is_real,
    )
