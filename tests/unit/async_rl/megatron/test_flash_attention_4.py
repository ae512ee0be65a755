"""FlashAttention 4 is used where it is installed, is for the GPU, and computes what torch's attention does."""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor
from torch.nn import functional

from async_rl.megatron.attention import varlen
from async_rl.megatron.attention.scores import Scores
from async_rl.megatron.attention.varlen import flash_attention_4
from async_rl.megatron.compat import PackedSeqParams

CPU, BF16 = torch.device("cpu"), torch.bfloat16


def reference(query: Tensor, key: Tensor, value: Tensor, packing: PackedSeqParams, _scores: Scores) -> Tensor:
    """The last query of a sequence belongs to its last key."""
    parts = []
    bounds = zip(pairwise(packing.cu_seqlens_q.tolist()), pairwise(packing.cu_seqlens_kv.tolist()), strict=True)
    for (start, stop), (first, last) in bounds:
        queries, keys, values = (each.transpose(0, 1) for each in (query[start:stop], key[first:last], value[first:last]))
        seen = torch.ones(stop - start, last - first, dtype=torch.bool).tril(last - first - (stop - start))
        parts.append(functional.scaled_dot_product_attention(queries, keys, values, seen, enable_gqa=True).transpose(0, 1))
    return torch.cat(parts)


def right(query: Tensor, key: Tensor, value: Tensor, **given: Any) -> tuple[Tensor, None]:
    assert given["causal"]
    assert given["deterministic"] is torch.are_deterministic_algorithms_enabled()
    packing = PackedSeqParams(cu_seqlens_q=given["cu_seqlens_q"], cu_seqlens_kv=given["cu_seqlens_k"])
    return reference(query, key, value, packing, Scores()), None


def off_by_one(query: Tensor, key: Tensor, value: Tensor, **given: Any) -> tuple[Tensor, None]:
    return right(query, key.roll(1, 0), value, **given)


def with_other_gradients(query: Tensor, key: Tensor, value: Tensor, **given: Any) -> tuple[Tensor, None]:
    return right(query, key, value.detach() + 0 * value, **given)


def wrong_for_many_sequences(query: Tensor, key: Tensor, value: Tensor, **given: Any) -> tuple[Tensor, None]:
    return (right if len(given["cu_seqlens_q"]) < 256 else off_by_one)(query, key, value, **given)


def wrong_over_many_keys(query: Tensor, key: Tensor, value: Tensor, **given: Any) -> tuple[Tensor, None]:
    """A little too much where averages are over hundreds of keys, and so small that it is little in numbers too."""
    first = given["cu_seqlens_k"][1] if given["max_seqlen_k"] > 256 else len(value)
    factors = torch.where(torch.arange(len(value)) < first, 1.0, 1.03).to(value.dtype)
    return right(query, key, value * factors[:, None, None], **given)


def not_compiled(*_: Tensor, **__: Any) -> tuple[Tensor, None]:
    raise ImportError("libcuda.so")


WRONG = (off_by_one, with_other_gradients, wrong_for_many_sequences, wrong_over_many_keys, not_compiled)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[..., Any]], None]]:
    """Install a stand-in for the package, as on a Hopper GPU."""
    flash_attention_4.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    monkeypatch.setattr(varlen, "torch_varlen", reference)

    def installed(kernel: Callable[..., Any]) -> None:
        for name in ("flash_attn", "flash_attn.cute"):
            module = ModuleType(name)
            module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
            module.__path__ = []
            vars(module)["flash_attn_varlen_func"] = kernel
            monkeypatch.setitem(sys.modules, name, module)

    yield installed
    flash_attention_4.cache_clear()


def found(dim: int = 64) -> Any:
    return flash_attention_4(CPU, BF16, 4, 2, dim)


def test_it_is_used_if_it_is_right(install: Callable[[Callable[..., Any]], None]) -> None:
    install(right)
    assert found() is not None
    assert found(dim=256) is None, "heads for which it was not tried"


@pytest.mark.parametrize("kernel", WRONG)
def test_torch_takes_its_place_if_it_is_not(install: Callable[[Callable[..., Any]], None], kernel: Callable[..., Any]) -> None:
    install(kernel)
    with capture_logs() as logged:
        assert found() is None
    assert "takes its place" in str(logged)


def test_it_is_not_asked_on_other_gpus_or_where_it_is_missing(
    install: Callable[[Callable[..., Any]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert found() is None, "not installed"
    flash_attention_4.cache_clear()
    install(right)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (8, 0))
    assert found() is None


def test_a_broken_flash_attention_stops_nothing(
    install: Callable[[Callable[..., Any]], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    package = tmp_path / "flash_attn"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('undefined symbol')\n")  # built for another torch
    monkeypatch.syspath_prepend(tmp_path)
    with capture_logs() as logged:
        assert found() is None
    assert "ImportError: undefined symbol" in str(logged)


def test_deterministic_runs_ask_for_deterministic_gradients(install: Callable[[Callable[..., Any]], None]) -> None:
    install(right)
    torch.use_deterministic_algorithms(True)
    try:
        assert found() is not None
    finally:
        torch.use_deterministic_algorithms(False)
