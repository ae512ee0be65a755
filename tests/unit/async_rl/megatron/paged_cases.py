"""Cases of attention over pages, and the difference between a kernel and torch's SDPA in float64.

As a program: the differences of the Triton kernel.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, kw_only=True)
class PagedCase:
    page: int
    dim: int
    heads: int
    kv_heads: int
    lengths: tuple[int, ...]
    """Keys of each request."""
    queries: tuple[int, ...] | None = None
    """Of each request, the last of its tokens; None: a step that decodes one token for each."""
    window: int | None = None
    scale: float | None = None
    dtype: torch.dtype = torch.float32
    options: dict[str, int] = field(default_factory=dict)
    """Of the Triton kernel alone."""


CASES = {
    "one token, full pages, a page and one": PagedCase(page=16, dim=64, heads=8, kv_heads=2, lengths=(1, 16, 17, 50)),
    "rows of padding": PagedCase(page=16, dim=64, heads=4, kv_heads=2, lengths=(20, 0, 0)),
    "splits, some empty": PagedCase(page=64, dim=128, heads=4, kv_heads=2, lengths=(300, 64, 65, 1), options={"splits": 4}),
    "a window": PagedCase(page=256, dim=32, heads=2, kv_heads=2, lengths=(300, 20, 7), window=20, options={"splits": 2}),
    "a head of 80": PagedCase(
        page=16, dim=80, heads=6, kv_heads=2, lengths=(70, 1, 33, 40), queries=(1, 1, 33, 5), options={"splits": 2}
    ),
    "chunks beside decoding": PagedCase(page=16, dim=64, heads=8, kv_heads=2, lengths=(30, 90, 70), queries=(1, 33, 70)),
    "chunks with a window and a scale": PagedCase(
        page=16, dim=64, heads=8, kv_heads=2, lengths=(30, 90, 70), queries=(1, 33, 70), window=16, scale=0.3
    ),
    "one head of keys, of 256": PagedCase(
        page=32, dim=256, heads=4, kv_heads=1, lengths=(70, 40), queries=(30, 1), dtype=torch.float16
    ),
    "many requests": PagedCase(
        page=8, dim=8, heads=2, kv_heads=1, lengths=(3,) * 9 + (20,), queries=(1, 2, 3, 1, 2, 1, 2, 3, 1, 20)
    ),
}
TOLERANCES = {torch.float32: 2e-6, torch.float16: 2e-3}
"""bfloat16 is compiled (test_compiled_kernels.py) and not interpreted: Triton's interpreter keeps it as integers, which its
matrix product multiplies as such."""


def largest_difference(attend: Callable[..., Tensor], case: PagedCase, **options: Any) -> float:
    generator = torch.Generator().manual_seed(1)
    counts = case.queries if case.queries is not None else (1,) * len(case.lengths)
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    requests, most = len(case.lengths), -(-max(case.lengths) // case.page)
    pool = torch.randn(2, requests * most + 1, case.page, case.kv_heads, case.dim, generator=generator).to(case.dtype)
    pages = torch.randperm(requests * most, generator=generator).view(requests, most).int()
    table = torch.full((requests, most + 1), -1, dtype=torch.int32)
    for request, length in enumerate(case.lengths):
        used = -(-length // case.page)
        table[request, :used] = pages[request, :used]
    width = (case.heads + 2 * case.kv_heads) * case.dim  # the queries lie beside keys and values, as a layer computes them
    projected = torch.randn(int(starts[-1]), width, generator=generator).to(case.dtype)
    queries = projected[:, : case.heads * case.dim].unflatten(1, (case.heads, case.dim))
    found = attend(
        queries,
        *pool,
        table,
        torch.tensor(case.lengths, dtype=torch.int32),
        starts,
        longest=max(case.lengths),
        scale=case.scale,
        window=case.window,
        is_decode_only=case.queries is None,
        **options,
    )
    wanted = [
        _attention(queries[start:stop], pool[:, table[request].long()].flatten(1, 2)[:, :length], case)
        for request, (start, stop, length) in enumerate(zip(starts[:-1], starts[1:], case.lengths, strict=True))
    ]
    # what a row of padding gets is not used, as long as it is a number
    used = torch.tensor(case.lengths).repeat_interleave(torch.tensor(counts)) > 0
    assert found.isfinite().all()
    return (found - torch.cat(wanted))[used].abs().max().item()


def _attention(queries: Tensor, keys_and_values: Tensor, case: PagedCase) -> Tensor:
    keys, values = keys_and_values.double()
    if len(keys) == 0:
        return queries.double()
    place = torch.arange(len(keys))
    own = place[-len(queries) :, None]
    seen = place <= own if case.window is None else (place <= own) & (place > own - case.window)
    q, k, v = (each.double().transpose(0, 1) for each in (queries, keys, values))
    attended = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=case.scale, enable_gqa=True)
    return attended.transpose(0, 1)


if __name__ == "__main__":
    from async_rl.megatron.attention.paged_kernels import paged_attention

    print(json.dumps({name: largest_difference(paged_attention, case, **case.options) for name, case in CASES.items()}))
