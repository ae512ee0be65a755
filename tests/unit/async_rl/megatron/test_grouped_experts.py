"""Experts by grouped products beside Megatron's experts one by one, on a CPU, for which torch has the product too."""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from async_rl.megatron import host, parallel, triton_kernels
from async_rl.megatron.experts.grouped import (
    ALIGNED,
    GroupedExperts,
    are_aligned,
    fits_grouped_products,
    in_a_row,
    lie_backwards,
    padded_places,
    what_is_missing,
)
from async_rl.megatron.experts.sharing import AllTokens, SharedTokens, share_tokens
from async_rl.megatron.model import build_model, forward_packed, pack
from async_rl.megatron.parameters.full_parameters import FullParameterLoader
from async_rl.megatron.parameters.table import table
from async_rl.megatron.triton_kernels import has_triton
from async_rl.models.shape import Experts, ModelShape
from tests.support.device_reads import DeviceReads

with host.importing():
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

CPU = torch.device("cpu")
EXPERTS = Experts(number=8, per_token=2, ffn=24, layers=(0, 1))
SHAPE = ModelShape(
    hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=48, vocab_size=50, max_positions=64, rope_theta=1e4,
    experts=EXPERTS,
)  # fmt: skip


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(0, 50, (length,), generator=generator) for length in (9, 1, 4)]
    logits = forward_packed(model, *pack(rows)).logits()
    (logits.float() * torch.randn(logits.shape, generator=generator)).sum().backward()
    return {"logits": logits.detach(), **{name: each.grad for name, each in model.named_parameters() if each.grad is not None}}


def test_grouped_experts_compute_what_single_ones_do() -> None:
    parallel.initialize(device=torch.device("cpu"))
    found = []
    for grouped in (False, True):
        model = build_model(SHAPE, device=torch.device("cpu"), dtype=torch.bfloat16, seed=1, grouped_experts=grouped)
        assert grouped is any(isinstance(each, GroupedExperts) for each in model.modules())
        found.append(gradients(model))
    single, together = found
    for name, each in together.items():  # an expert without tokens has no gradient alone
        expected = single.get(name, torch.zeros_like(each))
        assert (each - expected).abs().max() <= 0.05 * max(expected.abs().max().item(), 0.01), name
    assert single.keys() <= together.keys()


@pytest.mark.parametrize("counts", [[3, 0, 8, 5], [0, 0, 0], [16]])
@pytest.mark.parametrize("last_is_first", [False, True])
def test_groups_begin_at_multiples(counts: list[int], last_is_first: bool) -> None:
    places, ends, rows = padded_places(torch.tensor(counts), sum(counts), last_is_first=last_is_first)
    starts = [0, *ends.tolist()][: len(counts)]
    starts = starts[::-1] if last_is_first else starts
    assert all(start % ALIGNED == 0 for start in starts)
    assert places.tolist() == [start + each for start, count in zip(starts, counts, strict=True) for each in range(count)]
    assert rows >= ends[-1]
    assert rows % ALIGNED == 0


def test_a_device_without_kernels_computes_experts_one_by_one() -> None:
    assert are_aligned(SHAPE)
    assert not fits_grouped_products(SHAPE, CPU, torch.bfloat16)
    assert what_is_missing(SHAPE, CPU, torch.bfloat16) == "no GPU"


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[torch.dtype], str | None]]:
    """What is missing on such a GPU with Triton."""
    has_triton.cache_clear()
    module = ModuleType("triton")
    module.__spec__ = importlib.machinery.ModuleSpec("triton", None)
    monkeypatch.setitem(sys.modules, "triton", module)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    yield partial(what_is_missing, SHAPE, torch.device("cuda"))
    has_triton.cache_clear()
    triton_kernels.choose("auto")


def test_what_is_missing_has_a_name(on_hopper: Callable[[torch.dtype], str | None], monkeypatch: pytest.MonkeyPatch) -> None:
    assert on_hopper(torch.bfloat16) is None
    assert on_hopper(torch.float32) == "the model is in float32, needed is bfloat16"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (8, 0))
    assert on_hopper(torch.bfloat16) == "capability 8.0, needed is 9.0"
    triton_kernels.choose("torch")
    assert on_hopper(torch.bfloat16) == "no kernels are wanted (learner.kernels: torch)"


def test_a_gpu_without_triton_computes_experts_one_by_one(
    on_hopper: Callable[[torch.dtype], str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    assert on_hopper(torch.bfloat16) == "Triton is not installed, which has the activation"


def grouped_model(seed: int | None = 1) -> Any:
    parallel.initialize(device=CPU)
    return build_model(SHAPE, device=CPU, dtype=torch.bfloat16, seed=seed, grouped_experts=True)


def matrices(model: nn.Module) -> Iterator[Sequence[nn.Parameter]]:
    """The experts' matrices of each layer and kind."""
    for each in model.modules():
        if isinstance(each, GroupedExperts):
            yield from each._matrices


def drawn(seed: int) -> Mapping[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {row.name: torch.randn(row.shape, generator=generator).bfloat16() for row in table(SHAPE)}


class Made(TorchDispatchMode):
    """Bytes of the largest tensor that is made."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs if kwargs is not None else {}
        known = {each.untyped_storage().data_ptr() for each in tree_leaves((args, given)) if isinstance(each, Tensor)}
        made = func(*args, **given)
        for each in tree_leaves(made):
            if isinstance(each, Tensor) and each.untyped_storage().data_ptr() not in known:
                self.largest = max(self.largest, each.untyped_storage().nbytes())
        return made


def test_an_engine_copies_no_weights_of_experts_however_often_they_are_swapped() -> None:
    model = grouped_model(seed=None).eval()
    share_tokens(model)
    loader, given = FullParameterLoader(model, SHAPE), some_tokens(1, torch.bfloat16)
    rows = [in_a_row(each) for each in matrices(model)]
    assert len(rows) == 4
    for seed in (1, 2):
        loader.load(full := drawn(seed))
        for row, each in zip(rows, matrices(model), strict=True):
            assert in_a_row(each).data_ptr() == row.data_ptr() == each[0].data_ptr()
            assert torch.equal(row, torch.stack([*each]))
        named = [full[f"decoder.layers.0.mlp.experts.{number}.linear_fc1.weight"] for number in range(EXPERTS.number)]
        assert torch.equal(rows[0], torch.stack(named))
        with torch.inference_mode(), Made() as made:
            found = model.decoder.layers[0].mlp(given)[0]
        assert 0 < made.largest < min(row.nbytes for row in rows)

        for each in matrices(model):
            for matrix in each:
                matrix.data = matrix.data.clone()
        with torch.inference_mode(), Made() as made:
            assert torch.equal(model.decoder.layers[0].mlp(given)[0], found), "apart they compute the same, from a copy"
        assert made.largest >= max(row.nbytes for row in rows)
        for row, each in zip(rows, matrices(model), strict=True):
            for matrix, place in zip(each, row, strict=True):
                matrix.data = place


def test_experts_in_the_buffer_of_the_distributed_optimizer_are_read_where_they_are() -> None:
    """There the last parameter comes first, and the two matrices of an expert are neighbours."""
    found = []
    for is_wrapped in (False, True):
        model = grouped_model()
        for name, each in model.named_parameters():
            each.allreduce = "experts" not in name  # as the learner marks them
        trained = DistributedDataParallel(
            model.config,
            DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True, overlap_grad_reduce=False),
            model,
        ) if is_wrapped else model  # fmt: skip
        assert [lie_backwards(each) for each in matrices(model)] == [is_wrapped] * 4
        for each in matrices(model):
            ordered = each[::-1] if is_wrapped else each
            assert in_a_row(ordered).data_ptr() == ordered[0].data_ptr()
            assert torch.equal(in_a_row(ordered), torch.stack([*ordered]))
        logits = forward_packed(trained, *pack([torch.arange(9)])).logits()
        logits.float().square().sum().backward()
        buffers = {name: each.main_grad if is_wrapped else each.grad for name, each in model.named_parameters()}
        found.append({"logits": logits.detach(), **buffers})
    apart, wrapped = found
    for name, each in apart.items():
        assert torch.equal(wrapped[name].to(each.dtype), each), name


def test_matrices_that_lie_apart_are_put_in_a_row() -> None:
    whole = torch.arange(48.0).view(4, 3, 4)
    for each in ([*whole], [whole[0]], [*whole[::2]]):
        assert in_a_row(each).data_ptr() == each[0].data_ptr()
        assert torch.equal(in_a_row(each), torch.stack(each))
    uneven, backwards = [whole[0], whole[1], whole[3]], [whole[3], whole[2]]
    for each in (uneven, backwards, [whole[0], whole[1].clone(), whole[2]], [whole[0].clone(), whole[1]]):
        assert in_a_row(each).data_ptr() != each[0].data_ptr()
        assert torch.equal(in_a_row(each), torch.stack(each))


def layer_of(dtype: torch.dtype, *, grouped: bool, in_engine: bool) -> Any:
    parallel.initialize(device=torch.device("cpu"))
    model = build_model(SHAPE, device=torch.device("cpu"), dtype=dtype, seed=1, grouped_experts=grouped).eval()
    if in_engine:
        share_tokens(model)
    return model.decoder.layers[0].mlp


def some_tokens(count: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(count, 1, SHAPE.hidden, generator=torch.Generator().manual_seed(2)).to(dtype)


@pytest.mark.parametrize("count", [1, 7, 64])
def test_an_engine_gives_experts_the_tokens_that_megatron_dispatches(count: int) -> None:
    given = some_tokens(count, torch.float32)
    with torch.inference_mode():
        found, expected = (layer_of(torch.float32, grouped=False, in_engine=each)(given)[0] for each in (True, False))
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("grouped", "in_engine", "waits"), [(True, True, False), (True, False, True), (False, True, True)])
def test_grouped_experts_of_an_engine_wait_for_nothing_and_can_be_a_graph(grouped: bool, in_engine: bool, waits: bool) -> None:
    layer, given = layer_of(torch.bfloat16, grouped=grouped, in_engine=in_engine), some_tokens(6, torch.bfloat16)
    with torch.inference_mode():
        layer(given)
        with DeviceReads([given, *layer.parameters(), *layer.buffers()]) as reads:
            layer(given)
    assert bool(reads.places) is waits


@pytest.mark.parametrize("own", [range(8), range(2, 6), range(7, 8)], ids=["all experts", "some", "one"])
def test_outputs_of_a_token_are_added_in_float32_and_rounded_once(own: range) -> None:
    """In bfloat16 256 + 1 is 256, however often 1 is added."""
    parallel.initialize(device=CPU)
    shape = replace(SHAPE, experts=replace(EXPERTS, per_token=4))
    layer: Any = build_model(shape, device=CPU, dtype=torch.bfloat16, seed=1).decoder.layers[0].mlp
    layer.local_expert_indices = [*own]
    dispatcher = AllTokens(layer) if len(own) == 8 else SharedTokens(layer)
    routed = torch.zeros(50, 8, dtype=torch.bool)
    for token, row in enumerate(routed):
        row[torch.randperm(8, generator=torch.Generator().manual_seed(token))[:4]] = True
    values = torch.ones(50, 8).masked_fill_(routed.cumsum(1) == 1, 256.0)  # the first expert's
    tokens = torch.zeros(50, 1, SHAPE.hidden, dtype=torch.bfloat16)
    flat, probs = dispatcher.dispatch_preprocess(tokens, routed, torch.ones(50, 8))
    dispatched, counts, _ = dispatcher.dispatch_postprocess(flat, probs)
    outputs = values.T[own.start : own.stop][routed.T[own.start : own.stop]]
    assert counts.tolist() == routed.sum(0)[own.start : own.stop].tolist()
    assert len(dispatched) == len(outputs)
    summed = dispatcher.combine_preprocess(outputs[:, None].expand(-1, SHAPE.hidden).bfloat16())
    expected = (values * routed)[:, own.start : own.stop].sum(1).bfloat16()
    assert torch.equal(summed, expected[:, None].expand_as(summed))
    assert len(own) < 8 or (expected == 260).all()
