"""Bytes of live tensors in the output layer's passes over a row of 32,768 tokens, on tensors without memory (device meta)."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from async_rl.megatron import parallel
from async_rl.megatron.heads.divergence import divergence
from async_rl.megatron.heads.logprobs import token_logprobs, token_logprobs_and_entropies
from async_rl.megatron.heads.packed_output import PackedOutput
from tests.support.packed_outputs import packed_output
from tests.support.repository import ROOT

TOKENS, ENTRIES, HIDDEN = 32_768, 151_936, 2560
READ: dict[str, Callable[[PackedOutput, Tensor], Tensor]] = {
    "log-probabilities": token_logprobs,
    "and entropies": lambda output, targets: torch.stack(token_logprobs_and_entropies(output, targets)),
    "divergences of two models": lambda output, _: divergence(output, output, direction="mixed"),
}


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    parallel.initialize(device=torch.device("cpu"))


@pytest.mark.parametrize("how", READ)
def test_whole_logits_never_exist(how: str) -> None:
    from memory_parts.live_tensors import LiveTensors

    with LiveTensors() as live:
        hidden = torch.empty(TOKENS, HIDDEN, dtype=torch.bfloat16, device="meta", requires_grad=True)
        weight: Any = torch.nn.Parameter(torch.empty(ENTRIES, HIDDEN, dtype=torch.bfloat16, device="meta"))
        weight.main_grad = torch.empty(ENTRIES, HIDDEN, device="meta")
        targets = torch.empty(TOKENS, dtype=torch.long, device="meta")
        given, allowed = live.live, 2**31
        found = READ[how](packed_output(hidden, weight, bytes_at_once=allowed), targets)
        assert live.live - given < 2**22, "a few numbers per token are kept for the backward pass"
        found.sum().backward()
    peak = max(live.peaks.values()) - given - hidden.nbytes
    assert peak < allowed, f"besides the gradient of the hidden states: {live.largest_at_peak()[:4]}"
    assert peak > 0.6 * allowed, "chunks are not smaller than they may be"
    assert weight.grad_added_to_main_grad
