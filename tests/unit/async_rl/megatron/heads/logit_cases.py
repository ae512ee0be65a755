"""The kernels of logits in Triton's interpreter, beside whole logits in float64: prints the largest differences as JSON."""

from __future__ import annotations

import json
import multiprocessing
import tempfile
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]

from async_rl.megatron import parallel
from async_rl.megatron.heads.choices import Distribution, FusedChoices
from async_rl.megatron.heads.chunked_logits import IMPOSSIBLE
from async_rl.megatron.heads.logit_kernels import BLOCK, row_scores, slopes
from async_rl.megatron.heads.logprobs import Choice
from tests.unit.async_rl.megatron.heads.naive import Given, scores

ROWS = {
    "a block and more": (3, BLOCK + 77),
    "blocks and one": (2, 5 * BLOCK + 1),
    "few entries": (5, 7),
    "one row": (1, 300),
    "one entry": (4, 1),
    "no rows": (0, 300),
}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 1.0},
    "temperature": {"temperature": 0.7},
    "truncated": {"temperature": 0.7, "top_k": 6, "top_p": 0.8},
}
CHUNKS = {"one chunk": 2**20, "chunks of 3": 3 * 3 * 19 * 4}
SHARDED = {"padding": 19, "a rank with padding alone": 9}
"""Entries of the vocabulary; each of two ranks has 11, of which the last may be padding."""


def of_rows(shape: tuple[int, int], dtype: torch.dtype) -> float:
    """The kernels alone, on rows that lie apart, half of whose first block is impossible, with slopes of that dtype."""
    rows, entries = shape
    generator = torch.Generator().manual_seed(3)
    logits = (3 * torch.randn(rows, entries + 5, generator=generator))[:, :entries]
    logits[:, 3 : BLOCK // 2] = logits[:1, :1] = IMPOSSIBLE
    targets = torch.randint(0, min(entries, 3), (rows,), generator=generator)
    exact = logits.double().requires_grad_()
    log_p = exact.log_softmax(-1)
    wanted = log_p.gather(-1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    logprobs, entropies, lse = row_scores(logits, targets, with_entropies=True)
    alone = row_scores(logits, targets, with_entropies=False)
    assert all(map(torch.equal, alone, (logprobs, lse)))
    pairs = [(logprobs, wanted[0]), (entropies, wanted[1]), (lse, exact.logsumexp(-1))]
    directions = torch.randn(2, rows, generator=generator)
    for first, second in ((True, False), (False, True), (True, True)):
        given = [each if there else None for each, there in zip(directions, (first, second), strict=True)]
        found = slopes(logits, targets, -lse, entropies, *given, factor=2.0, dtype=dtype)
        assert found.dtype is dtype
        total = sum(2 * (each * value).sum() for each, value in zip(given, wanted, strict=True) if each is not None)
        assert isinstance(total, Tensor)
        pairs += [(found, *torch.autograd.grad(total, exact, retain_graph=True))]
        assert (found[(logits == IMPOSSIBLE) & (torch.arange(entries) != targets[:, None])] == 0).all(), "to the bit"
    return max(difference(*pair) for pair in pairs)


def fused(given: Given, way: dict[str, Any], bytes_at_once: int, *, with_entropies: bool = True) -> Any:
    distribution = Distribution(**{"top_k": 0, "top_p": 1.0, **way}, with_entropies=with_entropies)
    make = partial(FusedChoices, of=distribution, vocab_size=given.vocab_size, bytes_at_once=bytes_at_once)
    return lambda hidden, weight: Choice.apply(hidden, weight, given.targets, make)


def of_heads(tokens: int, way: str, chunks: str) -> float:
    """Values and both gradients from hidden states."""
    given, how = Given.random(tokens), WAYS[way]
    ours, alone = (fused(given, how, CHUNKS[chunks], with_entropies=each) for each in (True, False))

    def naive(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return scores(hidden, weight, given.targets, vocab_size=given.vocab_size, **how)

    parts = {
        "logprobs alone": (lambda *g: alone(*g)[0], lambda *g: naive(*g)[0]),
        "logprobs": (lambda *g: ours(*g)[0], lambda *g: naive(*g)[0]),
        "entropies": (lambda *g: ours(*g)[1], lambda *g: naive(*g)[1]),
        "both": (lambda *g: ours(*g)[0] + 0.3 * ours(*g)[1], lambda *g: naive(*g)[0] + 0.3 * naive(*g)[1]),
    }
    return max(
        difference(*pair)
        for found, wanted in parts.values()
        for pair in zip(given.gradients(found, torch.float32), given.gradients(wanted), strict=True)
    )


def of_a_rank(folder: str, rank: int) -> dict[str, float]:
    """One of two tensor ranks, each with half of the vocabulary."""
    meeting = parallel.Rendezvous(store=FileStore(str(Path(folder) / "store"), 2), rank=rank, world_size=2)
    parallel.initialize(device=torch.device("cpu"), rendezvous=meeting, tensor=2)
    found = {}
    for name, vocab_size in SHARDED.items():
        given = Given.random(10, vocab_size=vocab_size)
        exact = [each.clone().requires_grad_() for each in (given.hidden, given.weight)]
        wanted = scores(exact[0], exact[1], given.targets, vocab_size=vocab_size, temperature=0.7)
        for chunks, bytes_at_once in CHUNKS.items():
            hidden = given.hidden.float().requires_grad_()
            weight = given.weight.chunk(2)[rank].float().requires_grad_()
            ours = fused(given, WAYS["temperature"], bytes_at_once)(hidden, weight)
            pairs = list(zip(ours, wanted, strict=True))
            for own, all_of_it in pairs.copy():
                along = torch.linspace(-1, 1, 10)
                of_hidden, of_weight = torch.autograd.grad((own * along).sum(), (hidden, weight), retain_graph=True)
                its_hidden, its_weight = torch.autograd.grad((all_of_it * along).sum(), exact, retain_graph=True)
                torch.distributed.all_reduce(of_hidden)
                pairs += [(of_hidden, its_hidden), (of_weight, its_weight.chunk(2)[rank])]
            found[f"{name}, {chunks}"] = max(difference(*pair) for pair in pairs)
    parallel.shutdown()
    return found


def difference(found: Tensor, wanted: Tensor) -> float:
    """The largest, relative to numbers above 1. Infinite for what is not a number."""
    apart = (found.detach() - wanted.detach()).abs() / wanted.detach().abs().clamp(min=1)
    return apart.nan_to_num(nan=torch.inf).max().item() if apart.numel() else 0.0


if __name__ == "__main__":
    written = {f"{name}, {kind}": of_rows(ROWS[name], kind) for name in ROWS for kind in (torch.float32, torch.bfloat16)}
    parallel.initialize(device=torch.device("cpu"))
    written |= {f"{n} tokens, {way}, {each}": of_heads(n, way, each) for n in (0, 7) for way in WAYS for each in CHUNKS}
    with (
        tempfile.TemporaryDirectory() as meeting_place,
        ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool,
    ):
        for number, of_rank in enumerate(pool.map(of_a_rank, [meeting_place] * 2, range(2))):
            written |= {f"rank {number}, {name}": distance for name, distance in of_rank.items()}
    print(json.dumps(written))
