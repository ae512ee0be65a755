"""Keys and values are repeated only for kernels that cannot share their heads; kernels here are plain torch."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from async_rl.megatron.attention.varlen import takes_fewer_kv_heads

CPU = torch.device("cpu")


def sharing(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    q, k, v = (each.transpose(0, 1)[None] for each in (query, key, value))
    return functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)[0].transpose(0, 1)


def refusing(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    if query.shape[1] != key.shape[1]:
        raise ValueError("Expect query and key/value to have the same number of heads")
    return sharing(query, key, value)


def confusing(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    """Gives query heads other key heads than those of their group."""
    turns = query.shape[1] // key.shape[1]
    return sharing(query, key.repeat(1, turns, 1), value.repeat(1, turns, 1))


@pytest.mark.parametrize(("kernel", "takes"), [(sharing, True), (refusing, False), (confusing, False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_kernel_is_tried_before_it_gets_fewer_key_heads(kernel: Any, takes: bool, dtype: torch.dtype) -> None:
    assert takes_fewer_kv_heads(kernel, CPU, dtype, 4, 2, 8) is takes
