"""Operations on all gradients at once do what Megatron's loops do."""

from __future__ import annotations

import math

import pytest
import torch
from megatron.core import utils
from megatron.core.optimizer import clip_grads
from torch import Tensor

from async_rl.megatron import multi_tensor

NOOP = torch.zeros(1, dtype=torch.int)


def gradients() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(size, generator=generator) for size in ((3, 5), (7,), (1,), (40, 2))]


def test_the_norm_is_that_of_all_numbers() -> None:
    norm, _ = multi_tensor.l2_norm(0, NOOP, [gradients()], False)
    assert norm.shape == (1,)
    assert norm.item() == pytest.approx(math.sqrt(sum(each.square().sum().item() for each in gradients())), rel=1e-6)


def test_scaling_writes_the_same_bits() -> None:
    of_loop, ours = gradients(), gradients()
    utils.local_multi_tensor_scale(0, NOOP, [of_loop, of_loop], 0.3)
    multi_tensor.scale(0, NOOP, [ours, ours], 0.3)
    multi_tensor.scale(0, NOOP, [[], []], 0.3)
    assert all(map(torch.equal, of_loop, ours))


def test_copies_are_rounded() -> None:
    rounded = [torch.zeros_like(each, dtype=torch.bfloat16) for each in gradients()]
    multi_tensor.copy(gradients(), rounded)
    multi_tensor.copy([], [])
    assert all(map(torch.equal, rounded, [each.bfloat16() for each in gradients()]))


def test_megatron_calls_them_where_it_has_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    multi_tensor.install()
    assert clip_grads.l2_norm_impl is multi_tensor.l2_norm
    own = object()
    monkeypatch.setattr(clip_grads, "l2_norm_impl", own)  # as with Transformer Engine
    multi_tensor.install()
    assert clip_grads.l2_norm_impl is own
