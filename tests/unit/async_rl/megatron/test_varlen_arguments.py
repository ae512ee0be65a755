"""torch's variable-length attention takes the arguments that the learner gives it; only the kernel behind it needs a GPU."""

from __future__ import annotations

import pytest
import torch

from async_rl.megatron.attention.scores import Scores
from async_rl.megatron.attention.varlen import varlen_attention
from async_rl.megatron.model import packed_params


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, and make gpu-check compares what the kernel computes")
@pytest.mark.parametrize("kv_heads", [4, 2], ids=["as many key heads", "fewer key heads"])
@pytest.mark.parametrize("scores", [Scores(), Scores(scale=0.5), Scores(window=3)], ids=["plain", "scale", "window"])
def test_the_call_reaches_the_kernel(scores: Scores, kv_heads: int) -> None:
    query = torch.randn(8, 4, 32, dtype=torch.bfloat16)
    key = torch.randn(8, kv_heads, 32, dtype=torch.bfloat16)
    packing = packed_params(torch.tensor([0, 3, 8]), 5)
    with pytest.raises(NotImplementedError, match=r"_flash_attention_forward.* 'CPU' backend"):
        varlen_attention(query, key, key, packing, scores)
